package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"
)

// UDPServer answers each datagram with its name, the sender's address as it saw it, and
// the datagram itself, separated by newlines.
type UDPServer struct {
	Name      string
	conn      net.PacketConn
	datagrams atomic.Int64
}

// ServeUDP starts a server on a literal address, "10.0.0.2:53". It ends with Close of it or
// of the lab.
func (h *Host) ServeUDP(address, name string) (*UDPServer, error) {
	conn, err := h.ListenPacket("udp", address)
	if err != nil {
		return nil, fmt.Errorf("serve udp: %w", err)
	}
	s := &UDPServer{Name: name, conn: conn}
	go s.serve()
	h.lab.atClose(s.Close)
	return s, nil
}

func (s *UDPServer) serve() {
	buffer := make([]byte, 1<<16)
	for {
		n, from, err := s.conn.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		s.datagrams.Add(1)
		answer := append([]byte(s.Name+"\n"+from.String()+"\n"), buffer[:n]...)
		s.conn.WriteTo(answer, from) // a lost answer is for the client to notice
	}
}

// Addr is the address at which it listens.
func (s *UDPServer) Addr() net.Addr { return s.conn.LocalAddr() }

// Datagrams counts the received datagrams.
func (s *UDPServer) Datagrams() int64 { return s.datagrams.Load() }

// Close ends the server. It may be called again.
func (s *UDPServer) Close() error {
	if err := s.conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("close udp server %s: %w", s.Name, err)
	}
	return nil
}

// AskUDP sends one datagram from a socket of its own and returns the answering server. It sends
// once: a lost datagram is an error when ctx ends.
func (h *Host) AskUDP(ctx context.Context, address string, payload []byte) (Answer, error) {
	conn, err := h.Dial(ctx, "udp", address)
	if err != nil {
		return Answer{}, err
	}
	defer conn.Close()
	return AskUDPOn(ctx, conn, payload)
}

// AskUDPOn is AskUDP on a socket that exists: the same flow again.
func AskUDPOn(ctx context.Context, conn net.Conn, payload []byte) (Answer, error) {
	fail := func(err error) (Answer, error) {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return Answer{}, fmt.Errorf("ask %s from %s over udp: %w", conn.RemoteAddr(), conn.LocalAddr(), err)
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := conn.Write(payload); err != nil {
		return fail(err)
	}
	buffer := make([]byte, 1<<16)
	n, err := conn.Read(buffer)
	if err != nil {
		return fail(err)
	}
	parts := bytes.SplitN(buffer[:n], []byte("\n"), 3)
	if len(parts) != 3 || !bytes.Equal(parts[2], payload) {
		return fail(fmt.Errorf("the answer of %d bytes does not repeat the %d sent", n, len(payload)))
	}
	return Answer{Backend: string(parts[0]), Remote: string(parts[1]), Local: conn.RemoteAddr().String()}, nil
}
