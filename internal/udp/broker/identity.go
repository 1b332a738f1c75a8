package broker

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/process"
)

// Identity is the kernel's description of a client's process at the time when it connected. The client
// claims nothing in it.
type Identity struct {
	PID    int      `json:"pid"`
	UID    uint32   `json:"uid"` // in the broker's user namespace; an unmapped one is 65534
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups,omitempty"` // supplementary
	Cgroup string   `json:"cgroup,omitempty"` // in the unified hierarchy, "/system.slice/feed.service"; "": none
}

func (i Identity) String() string {
	return fmt.Sprintf("process %d (user %d, group %d, cgroup %q)", i.PID, i.UID, i.GID, i.Cgroup)
}

// Rule allows a process if all of its parts hold. It has at least one part.
type Rule struct {
	User   *uint32 `json:"user,omitempty"`
	Group  *uint32 `json:"group,omitempty"`  // primary or supplementary
	Cgroup string  `json:"cgroup,omitempty"` // this one, or one below it
}

func (r Rule) allows(i Identity) bool {
	below := r.Cgroup == "/" || i.Cgroup == r.Cgroup || strings.HasPrefix(i.Cgroup, r.Cgroup+"/")
	return (r.User == nil || *r.User == i.UID) &&
		(r.Group == nil || *r.Group == i.GID || slices.Contains(i.Groups, *r.Group)) &&
		(r.Cgroup == "" || i.Cgroup != "" && below)
}

func (r Rule) check() error {
	switch {
	case r == Rule{}:
		return errors.New("a rule must name a user, a group or a cgroup")
	case r.Cgroup != "" && !strings.HasPrefix(r.Cgroup, "/"):
		return fmt.Errorf("the cgroup %q of a rule must begin with /, as in /proc/PID/cgroup", r.Cgroup)
	case len(r.Cgroup) > 1 && strings.HasSuffix(r.Cgroup, "/"):
		return fmt.Errorf("the cgroup %q of a rule must not end with /", r.Cgroup)
	}
	return nil
}

// peer is a client's process.
type peer struct {
	Identity
	began uint64 // when the process began: process.StartTicks
	pidfd *os.File
	died  chan struct{} // closed when the process has ended
}

// identify asks the kernel for the process that has connected (SO_PEERCRED, SO_PEERGROUPS, SO_PEERPIDFD; unix(7)). locate
// adds the cgroup, once it is certain that the pidfd is the client's.
func identify(c *net.UnixConn) (*peer, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	p, pidfd := &peer{died: make(chan struct{})}, -1
	controlErr := raw.Control(func(fd uintptr) {
		// From now on each message carries its sender.
		if err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
			return
		}
		var who *unix.Ucred
		if who, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		p.PID, p.UID, p.GID = int(who.Pid), who.Uid, who.Gid
		if p.PID <= 0 {
			err = errors.New("it is in no PID namespace that the broker sees; run the broker in the host's")
			return
		}
		p.Groups = peerGroups(int(fd))
		if pidfd, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err != nil {
			pidfd, err = unix.PidfdOpen(p.PID, 0) // Linux before 6.5
		}
	})
	if err = errors.Join(controlErr, err); err != nil {
		return nil, fmt.Errorf("identify the process that connected: %w", err)
	}
	unix.CloseOnExec(pidfd)
	if err := unix.SetNonblock(pidfd, true); err != nil { // so that no thread blocks while it waits for the process's end
		_ = unix.Close(pidfd)
		return nil, fmt.Errorf("watch process %d: %w", p.PID, err)
	}
	p.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
	go p.watch()
	return p, nil
}

// peerGroups returns the supplementary groups; none if there are more than fit.
func peerGroups(fd int) []uint32 {
	groups := make([]uint32, 1024)
	size := uint32(4 * len(groups))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
		uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return nil
	}
	return slices.Clone(groups[:size/4])
}

// watch waits for the process's end. It also returns when the pidfd is closed.
func (p *peer) watch() {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return
	}
	err = raw.Read(func(fd uintptr) bool {
		polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(polled, 0)
		return err == nil && n > 0
	})
	if err == nil {
		close(p.died)
	}
}

// signal sends a signal to this process, and never to a later process with the same number.
func (p *peer) signal(signal unix.Signal) error {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return err
	}
	controlErr := raw.Control(func(fd uintptr) { err = unix.PidfdSendSignal(int(fd), signal, nil, 0) })
	return errors.Join(controlErr, err)
}

// alive reports whether the process that connected has not been reaped. It also works without the right to signal it (EPERM).
func (p *peer) alive() error {
	if err := p.signal(0); !errors.Is(err, unix.EPERM) {
		return err
	}
	return nil
}

// exiting reports whether the process has ended, or is about to. A process is marked (PF_EXITING) before its files are
// closed, and its pidfd signals the end after that: so exiting distinguishes a file that a dying process leaves from
// one that a living process closes.
func (p *peer) exiting() bool {
	stat, err := process.ReadStat(p.PID)
	if err != nil || p.alive() != nil { // if it is alive, the file that was read is this process's
		return true
	}
	flags, err := stat.Number(process.Flags)
	return err == nil && flags&process.Exiting != 0
}

// locate reads the cgroup. sender is the process that sent a message after the pidfd was opened. If it has the number of the
// process that connected while the pidfd says that this one lives, the two are the same. So a number that was used again is
// found, also where the kernel gives no pidfd with the connection.
func (p *peer) locate(sender int) error {
	if sender != p.PID {
		return fmt.Errorf("process %d connected, but process %d asks: the process that connects must ask itself", p.PID, sender)
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.PID))
	if err != nil {
		return fmt.Errorf("read the cgroup of process %d: %w", p.PID, err)
	}
	if p.began, err = beganAt(p.PID); err != nil {
		return fmt.Errorf("read when process %d began: %w", p.PID, err)
	}
	if err := p.alive(); err != nil { // if it is alive, the cgroup that was read is this process's
		return fmt.Errorf("process %d has ended: %w", p.PID, err)
	}
	p.Cgroup = unified(string(text))
	return nil
}

// unified returns the path in the unified hierarchy (cgroups(7): hierarchy 0, without controllers).
func unified(text string) string {
	for _, line := range strings.Split(text, "\n") {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSuffix(path, " (deleted)")
		}
	}
	return ""
}

func (p *peer) close() { _ = p.pidfd.Close() }
