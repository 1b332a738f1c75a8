package bed

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// dialFrom returns a dialer whose IPv4 TCP sockets are made inside a namespace. A socket
// stays in the namespace it was made in, whichever thread uses it later.
func (b *Bed) dialFrom(space string) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, _, address string) (net.Conn, error) {
		host, portText, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		port, err := strconv.ParseUint(portText, 10, 16)
		if err != nil {
			return nil, err
		}
		ip := net.ParseIP(host).To4()
		if ip == nil {
			return nil, fmt.Errorf("%s is no IPv4 address", host)
		}
		fd := -1
		err = b.In(space, func() (err error) {
			fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			return err
		})
		if err != nil {
			return nil, err
		}
		if deadline, has := ctx.Deadline(); has { // SO_SNDTIMEO bounds connect(2) too, socket(7)
			if err := setSendTimeout(fd, deadline); err != nil {
				unix.Close(fd)
				return nil, err
			}
		}
		if err := unix.Connect(fd, &unix.SockaddrInet4{Port: int(port), Addr: [4]byte(ip)}); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("connecting to %s: %w", address, err)
		}
		file := os.NewFile(uintptr(fd), address)
		defer file.Close() // FileConn has its own copy
		return net.FileConn(file)
	}
}

// setSendTimeout bounds how long connect and write may block.
func setSendTimeout(fd int, deadline time.Time) error {
	left := max(time.Until(deadline), time.Millisecond)
	value := unix.NsecToTimeval(left.Nanoseconds())
	return unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &value)
}
