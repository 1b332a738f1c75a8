package detect

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/test/uring"
)

// doing is the variable that makes the test's binary do something, in namespaces of its own, instead of testing.
const doing = "SHUNT_DETECT_DO"

// stage is the folder of a process's programs: a file system of its own mount namespace.
const stage = "/mnt"

const (
	farAddress  = "192.0.2.1" // RFC 5737; on lo, and not loopback by its number
	farPort     = 4444
	metaAddress = "169.254.169.254"
	nobody      = 65534
)

func TestMain(m *testing.M) {
	if what := os.Getenv(doing); what != "" {
		if err := do(strings.Fields(what)); err != nil {
			fmt.Fprintln(os.Stderr, what+":", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// do is a process's task: a word and its arguments.
func do(words []string) error {
	arguments := words[1:]
	switch words[0] {
	case "nothing":
		return nil
	case "wait":
		_, err := io.Copy(io.Discard, os.Stdin)
		return err
	case "as": // in new namespaces, under a name
		if err := prepare(); err != nil {
			return err
		}
		return run(filepath.Join(stage, arguments[0]), arguments[1:], nil)
	case "write":
		return touch(arguments[0], os.O_WRONLY)
	case "read":
		return touch(arguments[0], os.O_RDONLY)
	case "memory":
		f, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
		return errors.Join(err, f.Close())
	case "execute":
		return run(arguments[0], arguments[1:], nil)
	case "detached":
		return detached(arguments[0])
	case "setuid":
		return setuid(arguments)
	case "become":
		id, err := strconv.Atoi(arguments[0])
		return errors.Join(err, syscall.Setuid(id))
	case "nobody": // does something as a user without rights but that to change its user
		path := filepath.Join(stage, "nobody")
		c := exec.Command(path)
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, AmbientCaps: []uintptr{unix.CAP_SETUID}}
		return run(path, arguments, c)
	case "trace":
		return trace()
	case "poke":
		return poke(arguments[0])
	case "mount":
		target := strings.ReplaceAll(arguments[0], "PID", strconv.Itoa(os.Getpid()))
		return errors.Join(os.MkdirAll(target, 0o755), unix.Mount(stage, target, "", unix.MS_BIND, ""))
	case "bpf": // the kernel refuses both: the call itself is the event
		command, err := strconv.Atoi(arguments[0])
		_, _, _ = unix.Syscall(unix.SYS_BPF, uintptr(command), 0, 0)
		return err
	case "connect":
		return connect(arguments)
	case "shell":
		return shell(arguments)
	case "serve":
		return serve(arguments)
	case "hand": // a listening socket to another program, which serves: NAME
		return hand(arguments[0])
	case "inherit": // one, as descriptor 3, and serve: NAME
		l, err := net.FileListener(os.NewFile(3, "listener"))
		if err != nil {
			return err
		}
		return serveAt(l, arguments[0], overSocket)
	case "call": // ADDRESS, and listen
		c, err := net.Dial("tcp4", arguments[0])
		if err == nil {
			_, err = io.Copy(io.Discard, c)
		}
		return err
	case "login": // as sshd starts a session without a terminal: NAME
		return loggedIn(arguments[0])
	case "tool":
		return tool(arguments)
	}
	return errors.New("there is nothing of this name")
}

// prepare makes a network with addresses, and the stage.
func prepare() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	for _, address := range []string{farAddress, metaAddress} {
		if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(address), Mask: net.CIDRMask(32, 32)}}); err != nil {
			return err
		}
	}
	return errors.Join(netlink.LinkSetUp(lo), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), os.MkdirAll(stage, 0o755), unix.Mount("tmpfs", stage, "tmpfs", 0, "mode=755"))
}

// copyTo makes a copy of this program.
func copyTo(path string) error {
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, text, 0o755))
}

// run copies this program to a path, and has the copy do something.
func run(path string, words []string, prepared *exec.Cmd) error {
	if err := copyTo(path); err != nil {
		return err
	}
	c := prepared
	if c == nil {
		c = exec.Command(path)
		c.Stdin = os.Stdin
		c.Stdout = os.Stdout
	}
	c.Env = []string{doing + "=" + strings.Join(words, " ")}
	c.Stderr = os.Stderr
	return c.Run()
}

// touch opens a file of a folder that is this process's own: a file system over the first folder of the path. The file is
// made in a way that opens nothing.
func touch(path string, flags int) error {
	top := "/" + strings.Split(path, "/")[1]
	if top != stage {
		if err := errors.Join(os.MkdirAll(top, 0o755), unix.Mount("tmpfs", top, "tmpfs", 0, "mode=755")); err != nil {
			return fmt.Errorf("mount over %s: %w", top, err)
		}
	}
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), unix.Mknod(path, unix.S_IFREG|0o600, 0)); err != nil {
		return err
	}
	f, err := os.OpenFile(path, flags, 0)
	return errors.Join(err, f.Close())
}

// detached executes a file that has no name.
func detached(how string) error {
	fd := -1
	var err error
	if how == "memfd" {
		if fd, err = unix.MemfdCreate("x", 0); err != nil {
			return err
		}
		text, err := os.ReadFile("/proc/self/exe")
		if err != nil {
			return err
		}
		if _, err := unix.Write(fd, text); err != nil {
			return err
		}
	} else {
		gone := filepath.Join(stage, "gone")
		if err := copyTo(gone); err != nil {
			return err
		}
		if fd, err = unix.Open(gone, unix.O_RDONLY, 0); err != nil {
			return err
		}
		if err := os.Remove(gone); err != nil {
			return err
		}
	}
	return syscall.Exec(fmt.Sprintf("/proc/self/fd/%d", fd), []string{"x"}, []string{doing + "=nothing"})
}

// setuid has nobody execute a program of root's that has the bit, or not.
func setuid(arguments []string) error {
	path := arguments[0]
	if err := copyTo(path); err != nil {
		return err
	}
	mode := os.FileMode(0o755)
	if arguments[1] == "bit" {
		mode |= os.ModeSetuid
	}
	c := exec.Command(path)
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	c.Env = []string{doing + "=nothing"}
	return errors.Join(os.Chmod(path, mode), c.Run())
}

// child is a process to be traced.
func child(use func(pid int) error) error {
	c := exec.Command("/proc/self/exe")
	c.Env = []string{doing + "=wait"}
	in, err := c.StdinPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	err = use(c.Process.Pid)
	err = errors.Join(err, c.Process.Kill(), in.Close())
	_ = c.Wait() // it was killed
	return err
}

func trace() error {
	return child(unix.PtraceSeize)
}

func poke(whom string) error {
	if whom == "self" {
		_, err := unix.ProcessVMWritev(os.Getpid(), nil, nil, 0)
		return err
	}
	return child(func(pid int) error {
		_, err := unix.ProcessVMWritev(pid, nil, nil, 0)
		return err
	})
}

// dial connects a socket. Where nobody listens, the attempt is the event.
func dial(fd int, address string) error {
	to := &unix.SockaddrInet4{Port: farPort}
	copy(to.Addr[:], net.ParseIP(address).To4())
	if err := unix.Connect(fd, to); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
		return err
	}
	return nil
}

// dialByRing connects a socket by io_uring, where no system call shows it.
func dialByRing(fd int, address string) error {
	raw := unix.RawSockaddrInet4{Family: unix.AF_INET, Port: uint16(farPort>>8 | farPort&0xff<<8)}
	copy(raw.Addr[:], net.ParseIP(address).To4())
	_, err := uring.Do(0, uring.Entry{Operation: uring.Connect, FD: int32(fd), Address: unsafe.Pointer(&raw), Offset: uint64(unsafe.Sizeof(raw))})
	return err
}

// connect has a socket at a descriptor, and connects it.
func connect(arguments []string) error {
	at, err := strconv.Atoi(arguments[1])
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	if fd != at {
		if err := errors.Join(unix.Dup3(fd, at, 0), unix.Close(fd)); err != nil {
			return err
		}
	}
	return dial(at, arguments[0])
}

// listen answers every connection with a text.
func listen(address, say string) (stop func() error, err error) {
	l, err := net.Listen("tcp4", net.JoinHostPort(address, strconv.Itoa(farPort)))
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.WriteString(c, say)
				_ = c.(*net.TCPConn).CloseWrite()
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			}()
		}
	}()
	return l.Close, nil
}

// shell connects, and starts a program called sh, or another one, over the connection: ADDRESS HOW NAME.
func shell(arguments []string) (err error) {
	address, how, name := arguments[0], arguments[1], filepath.Join(stage, arguments[2])
	stop, err := listen(address, "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	switch how {
	case "unconnected", "late":
	case "ring":
		err = dialByRing(fd, address)
	default:
		err = dial(fd, address)
	}
	if err != nil {
		return err
	}
	if err := copyTo(name); err != nil {
		return err
	}
	c := exec.Command(name)
	c.Env = []string{doing + "=nothing"}
	switch how {
	case "connected", "ring": // all three are the socket
		f := os.NewFile(uintptr(fd), "socket")
		c.Stdin, c.Stdout, c.Stderr = f, f, f
		return c.Run()
	case "late": // connect when the socket is there already
		if err := errors.Join(unix.Dup3(fd, 0, 0), unix.Dup3(fd, 1, 0)); err != nil {
			return err
		}
		return dial(fd, address)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0) // "relay" and "unconnected"
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(pair[1]), "pair")
	c.Stdin, c.Stdout = f, f
	return c.Run()
}

// serve starts a program over a connection that is accepted, as inetd does: NAME.
func serve(arguments []string) error {
	l, err := net.Listen("tcp4", net.JoinHostPort(farAddress, strconv.Itoa(farPort)))
	if err != nil {
		return err
	}
	return serveAt(l, arguments[0], overSocket)
}

// hand has another program serve at a socket that it inherits.
func hand(name string) error {
	l, err := net.Listen("tcp4", net.JoinHostPort(farAddress, strconv.Itoa(farPort)))
	if err != nil {
		return err
	}
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	path := filepath.Join(stage, "worker")
	c := exec.Command(path)
	c.ExtraFiles = []*os.File{f}
	return run(path, []string{"inherit", name}, c)
}

// loggedIn accepts a connection, and starts a program that talks to this one alone.
func loggedIn(name string) error {
	l, err := net.Listen("tcp4", net.JoinHostPort(farAddress, strconv.Itoa(farPort)))
	if err != nil {
		return err
	}
	return serveAt(l, name, func(c *exec.Cmd, _ *os.File) error {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(pair[1]), "pair")
		c.Stdin, c.Stdout = f, f
		return c.Run()
	})
}

// overSocket runs a program whose stdin and stdout are the connection.
func overSocket(c *exec.Cmd, socket *os.File) error {
	c.Stdin, c.Stdout = socket, socket
	return c.Run()
}

// serveAt starts a program for a connection that is accepted.
func serveAt(l net.Listener, program string, start func(*exec.Cmd, *os.File) error) error {
	name := filepath.Join(stage, program)
	if err := copyTo(name); err != nil {
		return err
	}
	defer l.Close()                          //nolint:errcheck // the process ends
	client := filepath.Join(stage, "client") // a process of its own: the server connects to nobody
	if err := copyTo(client); err != nil {
		return err
	}
	calls := exec.Command(client)
	calls.Env = []string{doing + "=call " + l.Addr().String()}
	if err := calls.Start(); err != nil {
		return err
	}
	accepted, err := l.Accept()
	if err != nil {
		return err
	}
	f, err := accepted.(*net.TCPConn).File()
	if err != nil {
		return err
	}
	c := exec.Command(name)
	c.Env = []string{doing + "=nothing"}
	return errors.Join(start(c, f), f.Close(), accepted.Close(), calls.Wait())
}

// tool runs a program of the machine while a listener answers it with "exit".
func tool(arguments []string) error {
	if err := prepare(); err != nil {
		return err
	}
	stop, err := listen(farAddress, "exit\n")
	if err != nil {
		return err
	}
	c := exec.Command(arguments[0], strings.Split(os.Getenv(toolArguments), "\x01")...)
	c.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	_ = c.Run() // an intruder's shell may end as it likes
	return stop()
}
