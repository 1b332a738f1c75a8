package lease

import (
	"encoding/json"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

const (
	grantBytesMax = 1 << 16
	filesMax      = 1 + hook.MaxQueues // below SCM_MAX_FD, which is 253
)

// Hand gives a lease to the process at the other end of a SOCK_SEQPACKET socket: one message, the grant
// as JSON and its files (SCM_RIGHTS, unix(7)). It waits until the receiver has mapped the rings, because Linux
// 6.1 maps none of a bound socket: Bind comes after it. The receiver needs no capability to use them; a
// lease that can send lets it send any frame.
func Hand(socket int, l *Lease) error {
	text, err := json.Marshal(l.Grant)
	if err != nil {
		return fmt.Errorf("hand a lease over: %w", err)
	}
	if err := unix.Sendmsg(socket, text, unix.UnixRights(l.set.Files()...), nil, unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("hand a lease over: %w", err)
	}
	var ready [1]byte
	n, err := unix.Read(socket, ready[:])
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Read(socket, ready[:])
	}
	if err == nil && n == 0 {
		err = errors.New("the other process has closed the socket")
	}
	if err != nil {
		return fmt.Errorf("wait until a lease is mapped: %w", err)
	}
	return nil
}

// Take waits for a lease that another process hands over.
func Take(socket int) (Grant, *xsk.Set, error) {
	text := make([]byte, grantBytesMax)
	control := make([]byte, unix.CmsgSpace(4*filesMax))
	n, controlSize, flags, _, err := unix.Recvmsg(socket, text, control, unix.MSG_CMSG_CLOEXEC)
	for errors.Is(err, unix.EINTR) { // a socket with a time limit is not restarted (signal(7))
		n, controlSize, flags, _, err = unix.Recvmsg(socket, text, control, unix.MSG_CMSG_CLOEXEC)
	}
	if err != nil {
		return Grant{}, nil, fmt.Errorf("take a lease over: %w", err)
	}
	files, err := filesOf(control[:controlSize])
	if err != nil {
		return Grant{}, nil, fmt.Errorf("take a lease over: %w", err)
	}
	var grant Grant
	switch {
	case n == 0:
		err = errors.New("the other process has closed the socket")
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errors.New("the message is too long")
	default:
		grant, err = readGrant(text[:n])
	}
	if err != nil {
		closeFiles(files)
		return Grant{}, nil, fmt.Errorf("take a lease over: %w", err)
	}
	set, err := xsk.AdoptSet(grant.Layouts, files)
	if err != nil {
		return Grant{}, nil, err
	}
	if _, err := unix.Write(socket, []byte{1}); err != nil {
		return Grant{}, nil, errors.Join(fmt.Errorf("say that the lease is mapped: %w", err), set.Close())
	}
	return grant, set, nil
}

// readGrant reads what Hand has written.
func readGrant(text []byte) (grant Grant, err error) {
	if err := json.Unmarshal(text, &grant); err != nil {
		return Grant{}, fmt.Errorf("read the grant: %w", err)
	}
	if len(grant.Layouts) == 0 || len(grant.Layouts) > hook.MaxQueues {
		return Grant{}, fmt.Errorf("read the grant: it has %d queues, and 1 to %d are possible", len(grant.Layouts), hook.MaxQueues)
	}
	return grant, nil
}

// filesOf are the descriptors of a control message.
func filesOf(control []byte) (files []int, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("read the control message: %w", err)
	}
	for _, m := range messages {
		if some, err := unix.ParseUnixRights(&m); err == nil { // another kind has no files
			files = append(files, some...)
		}
	}
	return files, nil
}

func closeFiles(files []int) {
	for _, fd := range files {
		_ = unix.Close(fd)
	}
}
