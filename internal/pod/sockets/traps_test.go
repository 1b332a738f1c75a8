package sockets_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
	"golang.org/x/sys/unix"
)

// Data that a client sends at once arrives before the connection is accepted, and so before the server's end is in the
// map. Its next data comes after that.
func TestFirstBytesStayFirst(t *testing.T) {
	w := newPaired(t)
	l, err := w.Pods[1].Listen("tcp", netip.AddrPortFrom(w.Address(1, false), 0).String())
	w.must(err)
	defer l.Close() //nolint:errcheck // of the test
	raw, err := l.(*net.TCPListener).SyscallConn()
	w.must(err)
	w.must(raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, 1) }))
	w.must(err)
	rounds := 200
	if testing.Short() {
		rounds = 50
	}
	for i := range rounds {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		c, err := w.Pods[0].Dial(ctx, "tcp", l.Addr().String())
		cancel()
		w.must(err)
		for _, text := range []string{"one ", "two ", "three"} {
			_, err := c.Write([]byte(text))
			w.must(err)
		}
		s, err := l.Accept()
		w.must(err)
		deadline(c, s)
		w.must(c.(*net.TCPConn).CloseWrite())
		if text, err := io.ReadAll(s); string(text) != "one two three" || err != nil {
			t.Fatalf("round %d: %q has arrived, %v", i, text, err)
		}
		_, _ = c.Close(), s.Close()
	}
	counts, err := w.Counts()
	t.Log(counts, err)
}

// accepted is the amount of data that a connection takes for a reader that does not read.
func accepted(c net.Conn, data []byte) (n int) {
	for n < len(data) {
		_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond)) // it has a bound if it accepts nothing for so long
		m, err := c.Write(data[n:min(n+64<<10, len(data))])
		n += m
		if err != nil {
			break
		}
	}
	_ = c.SetWriteDeadline(time.Now().Add(patience))
	return n
}

// A reader that does not read stops its sender, and gets all when it does.
func TestSlowReader(t *testing.T) {
	w := newPaired(t)
	c, s := bedtest.Connect(t, w.Bed, false)
	deadline(c, s)
	data := pattern(64 << 20)
	n := accepted(c, data)
	_, queued, err := w.Paired()
	t.Logf("%d bytes are accepted, %d of them wait in the queue, %v", n, queued, err)
	if n == len(data) || queued == 0 || queued > sockets.LimitDefault {
		t.Errorf("%d bytes are accepted, %d of them wait in the queue", n, queued)
	}
	got := make([]byte, n)
	if _, err := io.ReadFull(s, got); err != nil || !bytes.Equal(got, data[:n]) {
		t.Errorf("what was accepted has not arrived: %v", err)
	}
	before := w.count("taken")
	// The kernel asks no program about the message after one that was sent in part (tcp_bpf_send_verdict keeps the verdict).
	for range 3 {
		w.must(carry(c, s, pattern(1000), 1000))
	}
	if w.count("taken") == before {
		counts, _ := w.Counts()
		n, queued, err := w.Paired()
		t.Errorf("after all was read, nothing is redirected: %v; %d sockets, %d bytes queued, %v", counts, n, queued, err)
	}
}

// However an end closes, the other end gets the data that was sent, and then the end of it.
func TestClosing(t *testing.T) {
	w := newPaired(t)
	data := pattern(300_000)
	for name, close := range map[string]func(c, s *net.TCPConn) error{
		"write and close": func(c, _ *net.TCPConn) error { return c.Close() },
		"half":            func(c, _ *net.TCPConn) error { return c.CloseWrite() },
		"both halves":     func(c, s *net.TCPConn) error { return errors.Join(c.CloseWrite(), s.CloseWrite()) },
		"the reader's half, and all of the writer's": func(c, s *net.TCPConn) error { return errors.Join(s.CloseWrite(), c.Close()) },
	} {
		for _, swap := range []bool{false, true} {
			c, s := bedtest.Connect(t, w.Bed, false)
			if swap {
				c, s = s, c
			}
			deadline(c, s)
			_, err := c.Write(data)
			w.must(err)
			w.must(close(c, s))
			if name == "half" {
				w.must(carry(s, c, data, 1000)) // the other half goes on
			}
			if got, err := io.ReadAll(s); err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s: %d of %d bytes have arrived, %v", name, len(got), len(data), err)
			}
			if name != "write and close" {
				continue
			}
			for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
				_, err := s.Write([]byte("too late"))
				if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("%s: writing to an end that has closed says %v", name, err)
				}
			}
		}
	}
}

// onSocket is done with a connection's file descriptor.
func onSocket(t *testing.T, c *net.TCPConn, do func(fd int) error) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(fd uintptr) { err = do(int(fd)) }), err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// MSG_PEEK leaves the data in the queue, edges of epoll come for each message, sendfile sends.
func TestReading(t *testing.T) {
	w := newPaired(t)
	c, s := bedtest.Connect(t, w.Bed, false)
	deadline(c, s)
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	w.must(err)
	defer unix.Close(epoll) //nolint:errcheck // of the test
	onSocket(t, s, func(fd int) error {
		return unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&0xffffffff, Fd: int32(fd)})
	})
	for i := range 1000 {
		text := fmt.Sprintf("message %03d", i%1000)
		_, err := c.Write([]byte(text))
		w.must(err)
		events := make([]unix.EpollEvent, 1)
		n, err := 0, error(unix.EINTR)
		for errors.Is(err, unix.EINTR) {
			n, err = unix.EpollWait(epoll, events, int(patience.Milliseconds()))
		}
		if n != 1 || err != nil {
			t.Fatalf("no edge comes for message %d: %d, %v", i, n, err)
		}
		onSocket(t, s, func(fd int) error {
			for _, flags := range []int{unix.MSG_PEEK, unix.MSG_PEEK, 0} {
				got := make([]byte, 100)
				n, _, err := unix.Recvfrom(fd, got, flags|unix.MSG_DONTWAIT)
				if err != nil || string(got[:n]) != text {
					return fmt.Errorf("%q was sent, %q came, %w", text, got[:max(n, 0)], err)
				}
			}
			return nil
		})
	}
	data := pattern(1 << 20)
	path := filepath.Join(t.TempDir(), "data")
	w.must(os.WriteFile(path, data, 0o600))
	file, err := os.Open(path)
	w.must(err)
	defer file.Close() //nolint:errcheck // only read
	sent := make(chan error, 1)
	go func() {
		_, err := c.ReadFrom(file) // sendfile(2)
		sent <- err
	}()
	got := make([]byte, len(data))
	if _, err := io.ReadFull(s, got); err != nil || !bytes.Equal(got, data) {
		t.Errorf("what sendfile has sent has not arrived: %v", err)
	}
	w.must(<-sent)
	if w.count("taken") < 1000 {
		t.Errorf("%d messages were redirected", w.count("taken"))
	}
}

// flow sends until it is told to end, and then closes its half. The other end has to get each byte.
func flow(from, to *net.TCPConn, end <-chan struct{}) error {
	block := pattern(10_000)
	sent := make(chan error, 1)
	total := 0
	go func() {
		for ; ; total += len(block) {
			select {
			case <-end:
				sent <- from.CloseWrite()
				return
			default:
			}
			if _, err := from.Write(block); err != nil {
				sent <- err
				return
			}
		}
	}()
	got := make([]byte, len(block))
	for blocks := 0; ; blocks++ {
		n, err := io.ReadFull(to, got)
		switch {
		case err == nil && bytes.Equal(got, block):
		case errors.Is(err, io.EOF):
			if err := <-sent; err != nil || blocks*len(block) != total {
				return fmt.Errorf("%d bytes of %d have arrived: %w", blocks*len(block), total, err)
			}
			return nil
		default:
			return fmt.Errorf("after %d blocks, %d bytes of another are not what was sent: %w", blocks, n, err)
		}
	}
}

// Streams are under way while their pairs are taken apart: nothing is lost, and then all goes by TCP.
func TestShutLosesNothing(t *testing.T) {
	w := newPaired(t)
	var streams sync.WaitGroup
	end := make(chan struct{})
	for i := range 4 {
		c, s := bedtest.Connect(t, w.Bed, i%2 == 1)
		deadline(c, s)
		streams.Go(func() {
			if err := flow(c, s, end); err != nil {
				t.Error(err)
			}
		})
	}
	for w.count("taken") < 1000 {
		runtime.Gosched()
	}
	stay, err := w.Shut(patience)
	if n, _, pairedErr := w.Paired(); stay != 0 || n != 0 || err != nil || pairedErr != nil {
		t.Errorf("%d stay, %d are in the map, %v", stay, n, errors.Join(err, pairedErr))
	}
	taken := w.count("taken")
	close(end)
	streams.Wait()
	c, s := bedtest.Connect(t, w.Bed, false)
	deadline(c, s)
	w.must(carry(c, s, pattern(10_000), 1000))
	if now := w.count("taken"); now != taken {
		t.Errorf("%d messages were redirected after it", now-taken)
	}
}

// Data that a reader has not read stays where it is, pinned, until it is read; the next process takes the pair apart.
func TestStalledReaderKeepsItsQueue(t *testing.T) {
	w := newWorld(t)
	w.enter()
	old, err := sockets.Open(w.options)
	w.must(err)
	c, s := bedtest.Connect(t, w.Bed, false)
	deadline(c, s)
	data := pattern(500_000)
	_, err = c.Write(data)
	w.must(err)
	stay, err := old.Shut(time.Second)
	if stay == 0 || err != nil {
		t.Fatalf("%d sockets stay, %v", stay, err)
	}
	w.must(old.Close())
	above := filepath.Dir(w.options.Folder)
	if stay, err := sockets.Drain(above, "", time.Second); stay == 0 || err != nil {
		t.Errorf("%d sockets stay for the next process, %v", stay, err)
	}
	done := make(chan error, 1)
	go func() {
		stay, err := sockets.Drain(above, "", patience)
		if stay > 0 {
			err = errors.Join(err, fmt.Errorf("%d sockets stay", stay))
		}
		done <- err
	}()
	got := make([]byte, len(data))
	if _, err := io.ReadFull(s, got); err != nil || !bytes.Equal(got, data) {
		t.Errorf("what was queued has not arrived: %v", err)
	}
	w.must(<-done)
	w.must(carry(c, s, pattern(10_000), 1000))
}

// A process that is killed leaves its pairs working, and bounded. The next one takes them apart, and then makes its own.
func TestPairsOfAKilledProcess(t *testing.T) {
	w := newWorld(t)
	w.enter()
	old, err := sockets.Open(w.options)
	w.must(err)
	c, s := bedtest.Connect(t, w.Bed, false)
	deadline(c, s)
	w.must(carry(c, s, pattern(10_000), 1000))
	w.must(old.Close()) // as the kernel does with the descriptors of a process that has ended
	before := w.seen()
	w.must(carry(c, s, pattern(100_000), 1000))
	if now := w.seen(); now != before {
		t.Errorf("the host has forwarded %d packets of a pair", now-before)
	}
	if n := accepted(c, pattern(64<<20)); n == 64<<20 {
		t.Error("the pair has no bound without its process")
	} else if _, err := io.ReadFull(s, make([]byte, n)); err != nil {
		t.Error(err)
	}
	if stay, err := sockets.Drain(filepath.Dir(w.options.Folder), "", patience); stay != 0 || err != nil {
		t.Errorf("%d sockets stay, %v", stay, err)
	}
	before = w.seen()
	w.must(carry(c, s, pattern(100_000), 1000))
	if w.seen() == before {
		t.Error("the host has forwarded nothing of a pair that was taken apart")
	}
	w.open()
	c, s = bedtest.Connect(t, w.Bed, false)
	deadline(c, s)
	w.must(carry(c, s, pattern(10_000), 1000))
	if w.count("taken") == 0 {
		t.Error("nothing is redirected")
	}
}

// A socket that nothing waits for stays in the map for a while: a call that was told to redirect to it may still wait
// for its lock, and the data that this call queues would be lost with the socket's place.
func TestShutAwaitsCallsUnderWay(t *testing.T) {
	w := newPaired(t)
	c, s := bedtest.Connect(t, w.Bed, false)
	deadline(c, s)
	w.must(carry(c, s, pattern(1000), 1000))
	begin := time.Now()
	stay, err := w.Shut(patience)
	if took := time.Since(begin); stay != 0 || err != nil || took < 300*time.Millisecond {
		t.Errorf("idle sockets have left the map after %s; %d stay, %v", took, stay, err)
	}
}

// Subflows of MPTCP are left alone, counted, and carry.
func TestMPTCPIsLeftAlone(t *testing.T) {
	w := newPaired(t)
	var listening net.ListenConfig
	listening.SetMultipathTCP(true)
	dialing := net.Dialer{Timeout: patience}
	dialing.SetMultipathTCP(true)
	var l net.Listener
	w.must(w.Pods[1].Run(func() (err error) {
		l, err = listening.Listen(context.Background(), "tcp", netip.AddrPortFrom(w.Address(1, false), 0).String())
		return err
	}))
	defer l.Close() //nolint:errcheck // of the test
	var c net.Conn
	w.must(w.Pods[0].Run(func() (err error) {
		c, err = dialing.Dial("tcp", l.Addr().String())
		return err
	}))
	defer c.Close() //nolint:errcheck // of the test
	s, err := l.Accept()
	w.must(err)
	defer s.Close() //nolint:errcheck // of the test
	deadline(c, s)
	if is, err := c.(*net.TCPConn).MultipathTCP(); !is || err != nil {
		t.Fatalf("the connection is of TCP alone: %v", err)
	}
	w.must(carry(c, s, pattern(1<<20), 10_000))
	w.must(carry(s, c, pattern(1<<20), 10_000))
	if n, _, err := w.Paired(); n != 0 || err != nil || w.count("mptcp") != 2 || w.count("taken") > 0 {
		counts, _ := w.Counts()
		t.Errorf("%d sockets are in the map, %v: %v", n, err, counts)
	}
}
