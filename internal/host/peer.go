package host

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// Peer is the process at the other end of a socket, as the kernel noted it when it connected (SO_PEERCRED, unix(7)).
func Peer(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var who *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		who, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, err
	}
	if failed != nil {
		return nil, fmt.Errorf("identify the process at the other end of the socket: %w", failed)
	}
	return who, nil
}
