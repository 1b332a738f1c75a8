package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// askTimeout bounds a question. A lost question is an error: nothing is lost on a veth.
const askTimeout = 5 * time.Second

// question is a query for an IPv4 address (RFC 1035, 4.1).
func question(id uint16, name string) []byte {
	m := binary.BigEndian.AppendUint16(nil, id)
	m = append(m, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0) // recursion is desired; one question
	for label := range strings.SplitSeq(name, ".") {
		m = append(append(m, byte(len(label))), label...)
	}
	return append(m, 0, 0, 1, 0, 1) // the root; A; IN
}

// ask asks one question as resolvers do, with a socket of its own, in the calling thread's network namespace. It
// returns the time from making the socket to the answer.
func ask(at netip.Addr, name string) (took time.Duration, err error) {
	begin := time.Now()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd) //nolint:errcheck // nothing is lost
	limit := unix.NsecToTimeval(askTimeout.Nanoseconds())
	if err := errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit), unix.Connect(fd, &unix.SockaddrInet4{Port: 53, Addr: at.As4()})); err != nil {
		return 0, err
	}
	id := uint16(begin.UnixNano())
	if _, err := unix.Write(fd, question(id, name)); err != nil {
		return 0, fmt.Errorf("ask %s for %s: %w", at, name, err)
	}
	answer := make([]byte, 1500)
	n, err := -1, error(unix.EINTR)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Read(fd, answer)
	}
	took = time.Since(begin)
	switch {
	case err != nil:
		return 0, fmt.Errorf("wait for %s's answer about %s: %w", at, name, err)
	case n < 12 || binary.BigEndian.Uint16(answer) != id || answer[3]&0xf != 0 || binary.BigEndian.Uint16(answer[6:]) == 0:
		return 0, fmt.Errorf("%s gave an unexpected answer about %s: %x", at, name, answer[:n])
	}
	return took, nil
}

// askMany asks so many questions one after the other, from the pod of the clients. names returns the name for each.
func (w *world) askMany(at netip.Addr, questions int, names func() string) (took []time.Duration, err error) {
	err = w.Pods[asking].Run(func() error {
		for range questions {
			one, err := ask(at, names())
			if err != nil {
				return err
			}
			took = append(took, one)
		}
		return nil
	})
	return took, err
}

// quantile is the smallest that so much of all are not above. It sorts them.
func quantile(all []time.Duration, q float64) time.Duration {
	slices.Sort(all)
	return all[min(int(q*float64(len(all))), len(all)-1)]
}
