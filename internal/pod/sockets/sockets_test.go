package sockets_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
	"github.com/shunt-lb/shunt/internal/value"
	"golang.org/x/sys/unix"
)

// patience bounds every wait for something that takes milliseconds.
const patience = time.Minute

var vip = netip.MustParseAddrPort("10.97.0.10:80")

// The checks with Must hold on this kernel: without them no test here can hold.
func TestKernelCarries(t *testing.T) {
	needsRoot(t)
	all, err := sockets.Test()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range all {
		t.Logf("%-10s must %-5v %s", c.Name, c.Must, c.Broken)
	}
	if bad := sockets.Bad(all, sockets.Waivable()); len(bad) > 0 {
		t.Errorf("this kernel breaks %v", bad)
	}
	if bad := sockets.Bad([]sockets.Check{{"order", true, "wrong"}, {"splice", false, "wrong"}, {"oob", false, "wrong"}, {"reset", false, ""}}, []string{"order", "oob"}); len(bad) != 2 || bad[0].Name != "order" || bad[1].Name != "splice" {
		t.Errorf("not waived are %v", bad)
	}
}

func needsRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces and cgroups")
	}
}

var worlds atomic.Int64

// world is two pods, and a cgroup in which this process is.
type world struct {
	*testing.T
	*bed.Bed
	rules   *plain.Rules
	options sockets.Options
	enter   func()
	*sockets.Sockets
}

// newWorld makes all of it but the programs.
func newWorld(t *testing.T) *world {
	t.Helper()
	needsRoot(t)
	w := &world{T: t}
	w.Bed, w.rules = bedtest.New(t, 2, plain.Service{Address: vip, Endpoint: netip.AddrPortFrom(bed.AddressOn(1, 1, false), 8080), Protocol: unix.IPPROTO_TCP})
	name := fmt.Sprintf("shunt-so-%d-%d", os.Getpid(), worlds.Add(1))
	w.enter = func() {
		path, leave, err := lab.EnterCgroup(name)
		w.must(err)
		w.options.Cgroups = []string{path}
		t.Cleanup(func() { w.must(leave()) })
	}
	w.must(kernel.Mount(kernel.DefaultPinRoot, slog.New(slog.DiscardHandler)))
	folder := filepath.Join(kernel.Directory(kernel.DefaultPinRoot, "_"+name))
	t.Cleanup(func() {
		if left, _ := filepath.Glob(filepath.Join(folder, "*", "*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
		w.must(os.RemoveAll(folder))
	})
	w.options = sockets.Options{Limit: sockets.LimitDefault, Folder: filepath.Join(folder, "1")}
	return w
}

// newPaired is a world with the programs.
func newPaired(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.enter()
	w.open()
	return w
}

func (w *world) open() {
	w.Helper()
	s, err := sockets.Open(w.options)
	w.must(err)
	w.Sockets = s
	w.Cleanup(func() {
		stay, err := s.Shut(patience)
		if err := errors.Join(err, s.Close()); err != nil || stay > 0 {
			w.Errorf("%d sockets stay, %v", stay, err)
		}
	})
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) count(of string) uint64 {
	w.Helper()
	counts, err := w.Counts()
	w.must(err)
	return counts[of].Packets
}

// pattern differs at every place, so that lost, doubled and moved data is seen.
func pattern(size int) []byte {
	all := make([]byte, size)
	for i := range all {
		all[i] = byte(i>>16 ^ i>>8 ^ i*31)
	}
	return all
}

// carry sends data in writes of a size, and expects it at the other end.
func carry(from io.Writer, to io.Reader, data []byte, write int) error {
	sent := make(chan error, 1)
	go func() {
		for rest := data; len(rest) > 0; {
			n := min(write, len(rest))
			if _, err := from.Write(rest[:n]); err != nil {
				sent <- err
				return
			}
			rest = rest[n:]
		}
		sent <- nil
	}()
	got := make([]byte, len(data))
	n, err := io.ReadFull(to, got)
	if err == nil && !bytes.Equal(got, data) {
		err = errors.New("other data has arrived")
	}
	if err != nil {
		return fmt.Errorf("after %d of %d bytes: %w", n, len(data), err)
	}
	return <-sent
}

// deadline bounds all operations on connections.
func deadline(all ...net.Conn) {
	for _, c := range all {
		_ = c.SetDeadline(time.Now().Add(patience))
	}
}

// Both families, writes of all sizes, an address translation between: the data goes past the host.
func TestPairs(t *testing.T) {
	w := newPaired(t)
	for name, at := range map[string]netip.AddrPort{
		"IPv4": netip.AddrPortFrom(w.Address(1, false), 0), "IPv6": netip.AddrPortFrom(w.Address(1, true), 0), "a service": vip,
	} {
		for _, write := range []int{1, 7, 1000, 16 << 10, 52_000, 1 << 20} {
			c, s := w.connect(at)
			deadline(c, s)
			data := pattern(min(write*2000, 3<<20))
			joined, taken, seen := w.count("joined"), w.count("taken"), w.seen()
			for range 2 {
				if err := carry(c, s, data, write); err != nil {
					t.Errorf("%s, writes of %d: %v", name, write, err)
				}
				c, s = s, c
			}
			if joined == 0 || w.count("taken") == taken {
				t.Errorf("%s, writes of %d: nothing was redirected: %d joined", name, write, joined)
			}
			if left := w.count("full") + w.count("order"); left == 0 && w.seen() != seen {
				t.Errorf("%s, writes of %d: the host has forwarded %d packets", name, write, w.seen()-seen)
			}
			c.Close() //nolint:errcheck // the next one is another
			s.Close() //nolint:errcheck
		}
	}
	counts, err := w.Counts()
	t.Log(counts, err)
}

// connect is a connection between the pods; to the service by its address.
func (w *world) connect(at netip.AddrPort) (c, s *net.TCPConn) {
	w.Helper()
	if at != vip {
		return bedtest.ConnectPodsAt(w.T, w.Pods[0], w.Pods[1], at)
	}
	l, err := w.Pods[1].Listen("tcp", netip.AddrPortFrom(w.Address(1, false), 8080).String())
	w.must(err)
	defer l.Close() //nolint:errcheck // it has accepted
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	one, err := w.Pods[0].Dial(ctx, "tcp", vip.String())
	w.must(err)
	other, err := l.Accept()
	w.must(err)
	w.Cleanup(func() { _, _ = one.Close(), other.Close() })
	return one.(*net.TCPConn), other.(*net.TCPConn)
}

func (w *world) seen() (packets uint64) {
	w.Helper()
	w.must(w.Node.Run(func() (err error) {
		packets, err = w.rules.Seen()
		return err
	}))
	return packets
}

// Sockets that were connected before are left alone, and work.
func TestOlderSocketsAreLeftAlone(t *testing.T) {
	w := newWorld(t)
	w.enter()
	c, s := bedtest.Connect(t, w.Bed, false)
	w.open()
	deadline(c, s)
	w.must(carry(c, s, pattern(1<<20), 1000))
	w.must(carry(s, c, pattern(1<<20), 1000))
	if n, _, err := w.Paired(); n != 0 || err != nil || w.count("taken") > 0 {
		t.Errorf("%d sockets, %v", n, err)
	}
}

// An end outside of the cgroups, or on another port, leaves both ends alone.
func TestStrangersAreLeftAlone(t *testing.T) {
	w := newWorld(t)
	l, err := w.Pods[1].Listen("tcp", netip.AddrPortFrom(w.Address(1, false), 0).String()) // outside: an accepted socket is its listener's
	w.must(err)
	defer l.Close() //nolint:errcheck // of the test
	w.enter()
	w.open()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := w.Pods[0].Dial(ctx, "tcp", l.Addr().String())
	w.must(err)
	defer c.Close() //nolint:errcheck // of the test
	s, err := l.Accept()
	w.must(err)
	defer s.Close() //nolint:errcheck // of the test
	deadline(c, s)
	w.must(carry(c, s, pattern(1000), 1000))
	w.must(carry(s, c, pattern(1<<20), 1000))
	if n, _, err := w.Paired(); n != 0 || err != nil || w.count("foreign") != 1 || w.count("taken") > 0 {
		counts, _ := w.Counts()
		t.Errorf("%d sockets, %v: %v", n, err, counts)
	}
	if counts, err := w.Counts(); err != nil || counts["unpaired"].Packets != 1 {
		t.Errorf("the client's first message alone is looked at: %v, %v", counts, err)
	}
}

// Only the ports of the list are paired.
func TestPorts(t *testing.T) {
	w := newWorld(t)
	w.enter()
	w.options.Ports = []value.PortRange{{First: 8080, Last: 8080}, {First: 9000, Last: 9010}}
	w.open()
	for port, want := range map[uint16]int{8080: 2, 9000: 2, 9010: 2, 9011: 0, 8081: 0} {
		c, s := bedtest.ConnectPodsAt(t, w.Pods[0], w.Pods[1], netip.AddrPortFrom(w.Address(1, false), port))
		deadline(c, s)
		w.must(carry(c, s, pattern(10_000), 1000))
		if n, _, err := w.Paired(); n != want || err != nil {
			t.Errorf("port %d: %d sockets are paired, want %d, %v", port, n, want, err)
		}
		_, _ = c.Close(), s.Close()
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			n, _, err := w.Paired()
			if n == 0 && err == nil {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%d sockets are in the map after they were closed, %v", n, err)
			}
		}
	}
}
