package sockets

import (
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"
)

// callPatience limits every blocking call of the test: data that takes longer never comes.
const callPatience = 2 * time.Second

// pair is a TCP connection over loopback whose ends the test has put into the map.
type pair struct {
	s    *Sockets
	a, b int // file descriptors
	keys [2]socketsSoKey
}

// newPair connects two sockets and puts them into the map. number makes the keys of pairs differ. Only the test has
// keys of this kind; the keys of connections are in other maps.
func newPair(s *Sockets, number uint32) (p *pair, err error) {
	p = &pair{s: s, a: -1, b: -1}
	p.keys = [2]socketsSoKey{{Sent: 2 * number, Received: 2*number + 1}, {Sent: 2*number + 1, Received: 2 * number}}
	if p.a, p.b, err = connected(); err != nil {
		return nil, errors.Join(fmt.Errorf("connect two sockets over loopback: %w", err), p.close())
	}
	return p, nil
}

// connected returns the ends of a new connection.
func connected() (a, b int, err error) {
	a, b = -1, -1
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return a, b, err
	}
	defer unix.Close(l) //nolint:errcheck // no further connection is accepted
	if err := errors.Join(unix.Bind(l, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(l, 1)); err != nil {
		return a, b, err
	}
	at, err := unix.Getsockname(l)
	if err != nil {
		return a, b, err
	}
	if a, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return a, b, err
	}
	if err := unix.Connect(a, at); err != nil {
		return a, b, err
	}
	if b, _, err = unix.Accept4(l, unix.SOCK_CLOEXEC); err != nil {
		return a, b, err
	}
	for _, fd := range []int{a, b} {
		wait := unix.NsecToTimeval(callPatience.Nanoseconds())
		err = errors.Join(err, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &wait))
	}
	return a, b, err
}

// join puts both ends into the map, as sh_so_ops does.
func (p *pair) join() error {
	maps := p.s.coll.Maps
	for i, fd := range []int{p.a, p.b} {
		if err := maps[socketsMapShSoOwn].Put(int32(fd), socketsSoOwn{Key: p.keys[i], Peer: p.keys[1-i]}); err != nil {
			return fmt.Errorf("give a socket its keys: %w", err)
		}
		if err := maps[socketsMapShSoSocks].Put(p.keys[i], uint64(fd)); err != nil {
			return fmt.Errorf("put a socket into the map: %w", err)
		}
	}
	seen, err := p.s.seen()
	if err != nil {
		return err
	}
	for _, one := range seen {
		if err := maps[socketsMapShSoEnds].Put(one.Key, one.At); err != nil {
			return fmt.Errorf("write the position of a socket: %w", err)
		}
	}
	if len(seen) < 2 {
		return fmt.Errorf("the map has %d sockets, although shunt added two", len(seen))
	}
	return nil
}

// close closes both ends.
func (p *pair) close() error {
	var errs []error
	for _, fd := range []int{p.a, p.b} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	p.a, p.b = -1, -1
	return errors.Join(errs...)
}

// took returns the number of messages that were redirected so far.
func (p *pair) took() (uint64, error) {
	counts, err := p.s.Counts()
	return counts[lefts()[uint32(socketsSoLeftSO_TAKEN)]].Packets, err
}

// send sends all of data by one call.
func (p *pair) send(data string) error {
	n, err := unix.SendmsgN(p.a, []byte(data), nil, nil, unix.MSG_NOSIGNAL)
	if err == nil && n != len(data) {
		err = io.ErrShortWrite
	}
	return err
}

// byTCP makes messages that do sends go by TCP, although both ends are in the map.
func (p *pair) byTCP(do func() error) error {
	return errors.Join(p.s.control(socketsSoControl{Passing: 1, Limit: p.s.opts.Limit}), do(), p.s.control(socketsSoControl{Limit: p.s.opts.Limit}))
}

// read reads n bytes.
func (p *pair) read(n int) (string, error) {
	all := make([]byte, 0, n)
	for len(all) < n {
		m, err := unix.Read(p.b, all[len(all):n])
		if err != nil || m == 0 {
			return string(all), err
		}
		all = all[:len(all)+m]
	}
	return string(all), nil
}
