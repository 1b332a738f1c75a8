package connect

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/test/uring"
)

// doing is the variable that makes the test's binary do something instead of testing.
const doing = "SHUNT_CONNECT_DO"

func TestMain(m *testing.M) {
	if what := os.Getenv(doing); what != "" {
		runtime.LockOSThread()
		if err := loopback(); err != nil {
			fmt.Fprintln(os.Stderr, "set the loopback device up:", err)
			os.Exit(1)
		}
		if err := do(strings.Fields(what)); err != nil {
			fmt.Println(wordOfError(err))
		} else {
			fmt.Println("done")
		}
		return
	}
	os.Exit(m.Run())
}

// loopback makes the network namespace, which is new, usable.
func loopback() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// wordOfError is the error's number for the test, or its text.
func wordOfError(err error) string {
	var number syscall.Errno
	switch {
	case !errors.As(err, &number):
		return err.Error()
	case number == unix.EPERM:
		return "EPERM"
	}
	return unix.ErrnoName(number)
}

// do is a process's task: a deed and its arguments.
func do(words []string) error {
	arguments := words[1:]
	switch words[0] {
	case "start": // PROGRAM DEED...
		return start(arguments[0], arguments[1:])
	case "orphan": // the same, of a process that nobody waits for
		r, w, err := os.Pipe()
		if err == nil {
			_, err = w.Write([]byte{'\n'})
		}
		if err != nil {
			return err
		}
		return orphan(arguments[0], arguments[1:], r)
	case "orphan-later": // the same, when a line comes
		return orphan(arguments[0], arguments[1:], os.Stdin)
	case "leave": // starts a program that waits, and ends
		c := exec.Command(arguments[0])
		c.Env = []string{doing + "=wait " + strings.Join(arguments[1:], " ")}
		c.Stdin, c.Stdout = os.Stdin, os.Stdout
		if err := c.Start(); err != nil {
			return err
		}
		os.Exit(0)
	case "time":
		return timeConnects(arguments)
	case "wait": // for a line, and then does something
		if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
			return err
		}
		return do(arguments)
	}
	deed := deeds[words[0]]
	if deed == nil {
		return fmt.Errorf("there is no deed %q", words[0])
	}
	return deed(netip.MustParseAddrPort(arguments[0]))
}

// start runs a program, whose output is this one's.
func start(program string, words []string) error {
	c := exec.Command(program)
	c.Env = []string{doing + "=" + strings.Join(words, " ")}
	c.Stdin = os.Stdin
	text, err := c.Output()
	if err != nil {
		return err
	}
	if said := strings.TrimSpace(string(text)); said != "done" {
		return errors.New(said)
	}
	return nil
}

// orphan has a process start another one, which waits for a line and goes on when its starter has ended. Its output comes by a pipe.
func orphan(program string, words []string, line *os.File) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	c := exec.Command("/proc/self/exe")
	c.Env = []string{doing + "=leave " + program + " " + strings.Join(words, " ")}
	c.Stdin, c.Stdout = line, w
	if err := errors.Join(c.Run(), w.Close()); err != nil { // its child is adopted by now
		return err
	}
	text := make([]byte, 64)
	n, err := r.Read(text)
	if err != nil {
		return err
	}
	if said := strings.TrimSpace(string(text[:n])); said != "done" {
		return errors.New(said)
	}
	return nil
}

// sockaddr is an address as system calls take it; family 0 stands for the address's own.
func sockaddr(at netip.AddrPort, family uint16) (raw [28]byte, size uintptr) {
	if family == 0 && at.Addr().Is4() {
		family = unix.AF_INET
	} else if family == 0 {
		family = unix.AF_INET6
	} else if family == unspecified {
		family = unix.AF_UNSPEC
	}
	*(*uint16)(unsafe.Pointer(&raw[0])) = family
	raw[2], raw[3] = byte(at.Port()>>8), byte(at.Port())
	if at.Addr().Is4() {
		four := at.Addr().As4()
		copy(raw[4:], four[:])
		return raw, 16
	}
	sixteen := at.Addr().As16()
	copy(raw[8:], sixteen[:])
	return raw, 28
}

func familyOf(at netip.AddrPort) int {
	if at.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// with opens a socket for a use.
func with(family, kind, protocol int, use func(fd int) error) error {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return err
	}
	return errors.Join(use(fd), unix.Close(fd))
}

func call(number uintptr, fd int, at netip.AddrPort, family uint16) error {
	raw, size := sockaddr(at, family)
	_, _, errno := unix.Syscall(number, uintptr(fd), uintptr(unsafe.Pointer(&raw[0])), size)
	if errno != 0 {
		return errno
	}
	return nil
}

// harmless takes errors that come after a program has allowed the call.
func harmless(err error) error {
	for _, also := range []error{unix.ECONNREFUSED, unix.EINPROGRESS, unix.EAGAIN} {
		if errors.Is(err, also) {
			return nil
		}
	}
	return err
}

func dialer(kind, protocol int) func(at netip.AddrPort) error {
	return func(at netip.AddrPort) error {
		return with(familyOf(at), kind, protocol, func(fd int) error { return harmless(call(unix.SYS_CONNECT, fd, at, 0)) })
	}
}

// sender sends a byte to an address, without connecting; family is the family that the address names.
func sender(kind int, flags uintptr, family uint16) func(at netip.AddrPort) error {
	return func(at netip.AddrPort) error {
		return with(familyOf(at), kind, 0, func(fd int) error {
			raw, size := sockaddr(at, family)
			payload := []byte{'x'}
			_, _, errno := unix.Syscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&payload[0])), 1, flags|unix.MSG_NOSIGNAL, uintptr(unsafe.Pointer(&raw[0])), size)
			if errno != 0 {
				return harmless(errno)
			}
			return nil
		})
	}
}

func binder(kind int) func(at netip.AddrPort) error {
	return func(at netip.AddrPort) error {
		return with(familyOf(at), kind, 0, func(fd int) error { return call(unix.SYS_BIND, fd, at, 0) })
	}
}

func maker(family, kind, protocol int) func(at netip.AddrPort) error {
	return func(netip.AddrPort) error {
		return with(family, kind, protocol, func(int) error { return nil })
	}
}

const protocolMPTCP = 262

// deeds by their names.
var deeds = map[string]func(at netip.AddrPort) error{
	"connect":       dialer(unix.SOCK_STREAM, 0),
	"connect-udp":   dialer(unix.SOCK_DGRAM, 0),
	"connect-mptcp": dialer(unix.SOCK_STREAM, protocolMPTCP),
	"connect-uring": func(at netip.AddrPort) error { return connectByRing(at, 0) },
	"connect-polled": func(at netip.AddrPort) error {
		return connectByRing(at, uring.Polled)
	},
	"connect-thread": func(at netip.AddrPort) error { // of another thread than the first one
		done := make(chan error)
		go func() { runtime.LockOSThread(); done <- dialer(unix.SOCK_STREAM, 0)(at) }()
		return <-done
	},
	"send":             sender(unix.SOCK_DGRAM, 0, 0),
	"send-unspecified": sender(unix.SOCK_DGRAM, 0, unspecified),
	"send-fast":        sender(unix.SOCK_STREAM, unix.MSG_FASTOPEN, 0),
	"bind":             binder(unix.SOCK_STREAM),
	"bind-udp":         binder(unix.SOCK_DGRAM),
	"listen": func(at netip.AddrPort) error {
		return with(familyOf(at), unix.SOCK_STREAM, 0, func(fd int) error {
			if err := call(unix.SYS_BIND, fd, at, 0); err != nil {
				return err
			}
			return unix.Listen(fd, 1)
		})
	},
	"listen-anywhere": func(at netip.AddrPort) error {
		return with(familyOf(at), unix.SOCK_STREAM, 0, func(fd int) error { return unix.Listen(fd, 1) })
	},
	"accept": func(at netip.AddrPort) error {
		return with(familyOf(at), unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0, func(fd int) error {
			if err := errors.Join(call(unix.SYS_BIND, fd, at, 0), unix.Listen(fd, 1)); err != nil {
				return fmt.Errorf("before it accepts: %v", err) //nolint:errorlint // it is no denial of accept
			}
			_, _, err := unix.Accept(fd)
			return harmless(err)
		})
	},
	"raw":    maker(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_UDP),
	"raw6":   maker(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_UDP),
	"packet": maker(unix.AF_PACKET, unix.SOCK_DGRAM, 0),
	"xdp":    maker(unix.AF_XDP, unix.SOCK_RAW, 0),
	"unix":   maker(unix.AF_UNIX, unix.SOCK_STREAM, 0),
	"sctp":   maker(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP),
	"disconnect": func(at netip.AddrPort) error {
		return with(familyOf(at), unix.SOCK_DGRAM, 0, func(fd int) error { return call(unix.SYS_CONNECT, fd, at, unspecified) })
	},
}

// unspecified means AF_UNSPEC; 0 means the address's own family.
const unspecified = 0xff00

func connectByRing(at netip.AddrPort, setup uint32) error {
	return with(familyOf(at), unix.SOCK_STREAM, 0, func(fd int) error {
		raw, size := sockaddr(at, 0)
		_, err := uring.Do(setup, uring.Entry{Operation: uring.Connect, FD: int32(fd), Address: unsafe.Pointer(&raw[0]), Offset: uint64(size)})
		return harmless(err)
	})
}
