// Package deed makes a process of its own repeat one operation, for tests and benchmarks of its cost: opening files,
// starting programs, connecting. A program that uses it calls Work first in its main function, or in TestMain, because
// the process runs a copy of that program.
package deed

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// variable makes a copy of the program a worker.
const variable = "SHUNT_DEED"

// Deed is one thing that a process does.
type Deed struct {
	Name string // one word
	Doc  string
	do   func(s *stage, n int) error
}

// All are the deeds in the order of tables.
var All = []Deed{
	{"open", "open a file to read it, and close it", func(s *stage, n int) error { return s.open(n, unix.O_RDONLY) }},
	{"open-write", "open a file to write to it, and close it", func(s *stage, n int) error { return s.open(n, unix.O_WRONLY) }},
	{"read", "read a byte of an open file", func(s *stage, n int) error { return s.transfer(n, unix.O_RDONLY, unix.Pread) }},
	{"write", "write a byte to an open file", func(s *stage, n int) error { return s.transfer(n, unix.O_WRONLY, unix.Pwrite) }},
	{"create", "create a file, close and delete it", (*stage).create},
	{"rename", "rename a file", (*stage).rename},
	{"fork", "fork, and wait for the child's end", (*stage).fork},
	{"exec", "start a program of no instructions but exit, and wait for its end", (*stage).exec},
	{"connect", "connect a UDP socket to a loopback address, which sends nothing", (*stage).connect},
	{"accept", "connect TCP sockets over loopback, accept, and close both", (*stage).accept},
}

// Prepare makes the files that deeds need in a folder.
func Prepare(folder string) error {
	return errors.Join(os.MkdirAll(folder, 0o755), os.WriteFile(filepath.Join(folder, "file"), []byte("x"), 0o644),
		os.WriteFile(filepath.Join(folder, "one"), nil, 0o644), os.WriteFile(filepath.Join(folder, "exit"), exitProgram(), 0o755))
}

// Worker is a process that does deeds.
type Worker struct {
	command *exec.Cmd
	in      *os.File
	out     *bufio.Reader
}

// Start starts a program, a copy of this one, as a worker: in a network namespace of its own, and in an environment
// without other variables. cgroup is a folder's descriptor; 0: the cgroup of this process. It needs root.
func Start(program string, cgroup uintptr) (*Worker, error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer read.Close() //nolint:errcheck // the child has it
	w := &Worker{command: exec.Command(program), in: write}
	// Without the signals by which Go's threads preempt each other, which would cost too.
	w.command.Env = []string{variable + "=1", "GODEBUG=asyncpreemptoff=1"}
	w.command.Stdin, w.command.Stderr = read, os.Stderr
	w.command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, UseCgroupFD: cgroup != 0, CgroupFD: int(cgroup)}
	out, err := w.command.StdoutPipe()
	if err == nil {
		err = w.command.Start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start a worker: %w", err), write.Close())
	}
	w.out = bufio.NewReader(out)
	return w, nil
}

// Do makes the worker do a deed n times in a folder, and returns the CPU time of the worker and its children. If
// denied, each attempt has to fail with EPERM.
func (w *Worker) Do(name string, n int, folder string, denied bool) (time.Duration, error) {
	if _, err := fmt.Fprintf(w.in, "%s %d %v %s\n", name, n, denied, folder); err != nil {
		return 0, fmt.Errorf("ask a worker for %s: %w", name, err)
	}
	line, err := w.out.ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("a worker has ended at %s: %w", name, err)
	}
	var ns int64
	if _, err := fmt.Sscanf(line, "took %d", &ns); err != nil {
		return 0, fmt.Errorf("%s in %s: %s", name, folder, strings.TrimSpace(line))
	}
	return time.Duration(ns), nil
}

// Close ends the worker.
func (w *Worker) Close() error { return errors.Join(w.in.Close(), w.command.Wait()) }

// Work does the deeds that Do requests, and ends the process, if this is a worker.
func Work() {
	if os.Getenv(variable) == "" {
		return
	}
	if err := loopback(); err != nil {
		fmt.Println("set the loopback device up:", err)
		os.Exit(1)
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		s, name, n := &stage{}, "", 0
		if _, err := fmt.Sscan(lines.Text(), &name, &n, &s.denied, &s.folder); err != nil {
			fmt.Printf("%q is no deed: %v\n", lines.Text(), err)
			continue
		}
		if took, err := s.run(name, n); err != nil {
			fmt.Println(strings.ReplaceAll(err.Error(), "\n", "; "))
		} else {
			fmt.Println("took", took.Nanoseconds())
		}
	}
	os.Exit(0)
}

// loopback sets up the loopback interface of the new network namespace.
func loopback() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// stage is the place of a deed, and its expected outcome.
type stage struct {
	folder string
	denied bool
}

func (s *stage) run(name string, n int) (time.Duration, error) {
	for _, d := range All {
		if d.Name == name {
			before := cpuTime()
			err := d.do(s, n)
			return cpuTime() - before, err
		}
	}
	return 0, fmt.Errorf("there is no deed %q", name)
}

// cpuTime is the CPU time of this process and of its children that have ended.
func cpuTime() time.Duration {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &now) // cannot fail with this clock
	var children unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_CHILDREN, &children) // likewise
	return time.Duration(now.Nano() + children.Utime.Nano() + children.Stime.Nano())
}

// judge compares an attempt with its expected outcome.
func (s *stage) judge(err error) error {
	switch {
	case s.denied && errors.Is(err, unix.EPERM):
		return nil
	case s.denied && err == nil:
		return errors.New("it should be denied, and is not")
	}
	return err
}

func (s *stage) path(name string) string { return filepath.Join(s.folder, name) }

func (s *stage) open(n, flags int) error {
	path := s.path("file")
	for range n {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Close(fd)
		}
		if err = s.judge(err); err != nil {
			return err
		}
	}
	return nil
}

func (s *stage) transfer(n, flags int, call func(fd int, data []byte, offset int64) (int, error)) error {
	fd, err := unix.Open(s.path("file"), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	data := []byte{'x'}
	for range n {
		if _, err := call(fd, data, 0); err != nil {
			return errors.Join(err, unix.Close(fd))
		}
	}
	return unix.Close(fd)
}

func (s *stage) create(n int) error {
	path := s.path("new")
	for range n {
		fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o644)
		if err == nil {
			err = errors.Join(unix.Close(fd), unix.Unlink(path))
		}
		if err = s.judge(err); err != nil {
			return err
		}
	}
	return nil
}

// rename renames once more if n is odd, so that the file has its old name again.
func (s *stage) rename(n int) error {
	from, to := s.path("one"), s.path("other")
	for range n + n%2 {
		err := unix.Rename(from, to)
		if err == nil {
			from, to = to, from
		}
		if err = s.judge(err); err != nil {
			return err
		}
	}
	return nil
}

func (s *stage) fork(n int) error {
	for range n {
		pid, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if errno != 0 {
			return errno
		}
		if pid == 0 { // no code of Go's runtime may run here
			syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		if err := wait(int(pid)); err != nil {
			return err
		}
	}
	return nil
}

func (s *stage) exec(n int) error {
	path := s.path("exit")
	for range n {
		pid, err := syscall.ForkExec(path, []string{path}, &syscall.ProcAttr{})
		if err == nil {
			err = wait(pid)
		}
		if err = s.judge(err); err != nil {
			return err
		}
	}
	return nil
}

func wait(pid int) error {
	for {
		var status unix.WaitStatus
		switch _, err := unix.Wait4(pid, &status, 0, nil); {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case !status.Exited() || status.ExitStatus() != 0:
			return fmt.Errorf("a child ended with %x", status)
		default:
			return nil
		}
	}
}

func (s *stage) connect(n int) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	to := &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}
	for range n {
		if err := s.judge(unix.Connect(fd, to)); err != nil {
			return errors.Join(err, unix.Close(fd))
		}
	}
	return unix.Close(fd)
}

func (s *stage) accept(n int) error {
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	err = unix.Bind(l, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	if err == nil {
		err = unix.Listen(l, 1)
	}
	var at unix.Sockaddr
	if err == nil {
		at, err = unix.Getsockname(l)
	}
	for range n {
		if err == nil {
			err = acceptOne(l, at)
		}
	}
	return errors.Join(err, unix.Close(l))
}

func acceptOne(l int, at unix.Sockaddr) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	err = errors.Join(unix.Connect(fd, at), unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})) // no TIME_WAIT
	if err == nil {
		var taken int
		if taken, _, err = unix.Accept4(l, unix.SOCK_CLOEXEC); err == nil {
			return errors.Join(unix.Close(fd), unix.Close(taken))
		}
	}
	return errors.Join(err, unix.Close(fd))
}
