package announce

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// wire is a packet socket on one interface, for ARP or for neighbour discovery.
type wire struct {
	file *os.File
	to   unix.SockaddrLinklayer
	name string
}

// ndOnly lets neighbour solicitations and advertisements through, so that a probe does not
// copy all IPv6 traffic. Offsets count from the Ethernet header.
var ndOnly = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 14 + 6}, // next header
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.IPPROTO_ICMPV6, Jt: 0, Jf: 4},
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 14 + 40}, // ICMPv6 type
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 135, Jt: 1, Jf: 0},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 136, Jt: 0, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 1500},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

func openWire(ns netns.NsHandle, link netlink.Link, v4 bool) (*wire, error) {
	kind := uint16(unix.ETH_P_IPV6)
	if v4 {
		kind = unix.ETH_P_ARP
	}
	w := &wire{name: link.Attrs().Name}
	w.to = unix.SockaddrLinklayer{Protocol: kind<<8 | kind>>8, Ifindex: link.Attrs().Index, Halen: 6}
	err := inside(ns, func() error {
		// Protocol 0: it receives nothing until it is bound, with the filter in place.
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		if !v4 {
			program := unix.SockFprog{Len: uint16(len(ndOnly)), Filter: &ndOnly[0]}
			err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program)
		}
		if err == nil {
			err = unix.Bind(fd, &w.to)
		}
		if err != nil {
			_ = unix.Close(fd)
			return err
		}
		w.file = os.NewFile(uintptr(fd), "packet:"+w.name)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open a packet socket on %s: %w", w.name, err)
	}
	return w, nil
}

func (w *wire) close() { _ = w.file.Close() }

func (w *wire) send(frame []byte) error {
	to := w.to
	copy(to.Addr[:], frame[:6])
	raw, err := w.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("send on %s: %w", w.name, err)
	}
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		sent = unix.Sendto(int(fd), frame, 0, &to)
		return !errors.Is(sent, unix.EAGAIN)
	})
	if err = errors.Join(err, sent); err != nil {
		return fmt.Errorf("send on %s: %w", w.name, err)
	}
	return nil
}

// receive calls each with the frames that arrive within d, until it returns false.
func (w *wire) receive(d time.Duration, each func(frame []byte) bool) error {
	if err := w.file.SetReadDeadline(time.Now().Add(d)); err != nil {
		return fmt.Errorf("listen on %s: %w", w.name, err)
	}
	buffer := make([]byte, 1500)
	for {
		n, err := w.file.Read(buffer)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("listen on %s: %w", w.name, err)
		}
		if !each(buffer[:n]) {
			return nil
		}
	}
}

// probe asks ProbeCount times whether anybody has the address and returns the hardware
// address of the first one who says so, or nil.
func (a *Announcer) probe(ctx context.Context, link netlink.Link, addr netip.Addr) (net.HardwareAddr, error) {
	w, err := openWire(a.ns, link, addr.Is4())
	if err != nil {
		return nil, err
	}
	defer w.close()
	defer context.AfterFunc(ctx, w.close)() // ends a receive under way
	mac := link.Attrs().HardwareAddr
	frame, err := probeFrame(mac, addr)
	if err != nil {
		return nil, err
	}
	var owner net.HardwareAddr
	for i := range a.opts.ProbeCount {
		if err := w.send(frame); err != nil {
			return nil, err
		}
		listen := a.opts.ProbeInterval
		if i == a.opts.ProbeCount-1 {
			listen = a.opts.ProbeWait
		}
		err := w.receive(listen, func(frame []byte) bool {
			owner = conflict(frame, mac, addr)
			return owner == nil
		})
		if err != nil || owner != nil {
			return owner, err
		}
	}
	return nil, nil
}

// tell sends the announcements. It stops early when told to start over.
func (a *Announcer) tell(ctx context.Context, j *job) error {
	for i := range a.opts.AnnounceCount {
		if i > 0 {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-j.again:
				j.startOver() // for run to see
				return nil
			case <-time.After(a.opts.AnnounceInterval):
			}
		}
		link, err := a.link(j.iface)
		if err != nil {
			return err
		}
		frame, err := announceFrame(link.Attrs().HardwareAddr, j.addr)
		if err != nil {
			return err
		}
		w, err := openWire(a.ns, link, j.addr.Is4())
		if err != nil {
			return err
		}
		err = w.send(frame)
		w.close()
		if err != nil {
			return err
		}
	}
	return nil
}

// keepNamespace duplicates the handle, so that the caller may close its own.
func keepNamespace(ns *netns.NsHandle) (netns.NsHandle, error) {
	if ns == nil || !ns.IsOpen() {
		return netns.None(), nil
	}
	fd, err := unix.FcntlInt(uintptr(*ns), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return netns.None(), fmt.Errorf("keep a handle of the network namespace: %w", err)
	}
	return netns.NsHandle(fd), nil
}

func closeNamespace(ns netns.NsHandle) {
	if ns.IsOpen() {
		_ = ns.Close()
	}
}

// inside runs f on a thread that is in the namespace; None is the process's own.
func inside(ns netns.NsHandle, f func() error) error {
	if !ns.IsOpen() {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			done <- fmt.Errorf("get the current network namespace: %w", err)
			return
		}
		defer home.Close()
		if err = netns.Set(ns); err != nil {
			err = fmt.Errorf("enter the network namespace: %w", err)
		} else {
			err = f()
		}
		if netns.Set(home) == nil {
			runtime.UnlockOSThread() // otherwise the thread ends with this goroutine
		}
		done <- err
	}()
	return <-done
}
