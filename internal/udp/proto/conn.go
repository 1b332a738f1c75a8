package proto

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// scmMaxFD is the largest number of files that a message can carry (unix(7)). It is more than any message needs, so all
// files that come are seen, and closed.
const scmMaxFD = 253

// Conn is one side of a connection. One goroutine may send while another receives, but no two may send, or receive, at once.
type Conn struct {
	unix    *net.UnixConn
	message [SizeMax]byte
	control []byte
}

// Sender is the process that has sent a message, from the kernel. PID is 0 if the receiver has not asked for it
// (SO_PASSCRED).
type Sender struct {
	PID int
	UID uint32
}

// NewConn makes a Conn of a SOCK_SEQPACKET socket.
func NewConn(c *net.UnixConn) *Conn {
	return &Conn{unix: c, control: make([]byte, unix.CmsgSpace(4*scmMaxFD)+unix.CmsgSpace(unix.SizeofUcred))}
}

// Dial connects to a broker's socket.
func Dial(ctx context.Context, path string) (*Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, err
	}
	return NewConn(c.(*net.UnixConn)), nil
}

// Unix returns the socket.
func (c *Conn) Unix() *net.UnixConn { return c.unix }

// Send sends a message, with copies of files. limit is the time that it waits for a receiver that does not read.
func (c *Conn) Send(b Body, limit time.Duration, files ...int) error {
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	if err := c.unix.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	_, _, err := c.unix.WriteMsgUnix(Encode(b), rights, nil)
	return err
}

// Receive waits for a message until a deadline; zero: without one. If a message cannot be read, its files
// are closed. The error is io.EOF if the other side has closed the connection.
func (c *Conn) Receive(deadline time.Time) (b Body, files []int, from Sender, err error) {
	if err := c.unix.SetReadDeadline(deadline); err != nil {
		return nil, nil, from, err
	}
	n, controlSize, flags, _, err := c.unix.ReadMsgUnix(c.message[:], c.control)
	if err != nil {
		return nil, nil, from, err
	}
	files, from, err = readControl(c.control[:controlSize])
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = fmt.Errorf("%w: it is longer than every message of the protocol", ErrMalformed)
	}
	if err == nil {
		b, err = Decode(c.message[:n], len(files))
	}
	if err != nil {
		for _, fd := range files {
			_ = unix.Close(fd)
		}
		return nil, nil, from, err
	}
	return b, files, from, nil
}

// readControl returns the files and the sender that came with a message (unix(7)).
func readControl(control []byte) (files []int, from Sender, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, from, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	for _, m := range messages {
		if some, err := unix.ParseUnixRights(&m); err == nil { // control messages of other kinds have no files
			files = append(files, some...)
		}
		if who, err := unix.ParseUnixCredentials(&m); err == nil {
			from = Sender{int(who.Pid), who.Uid}
		}
	}
	return files, from, nil
}

// Close ends the connection.
func (c *Conn) Close() error {
	if err := c.unix.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}
