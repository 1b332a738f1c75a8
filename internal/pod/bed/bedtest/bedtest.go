// Package bedtest makes beds for tests: hosts with pods, and connections between them. Only tests import it.
package bedtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/plain"
)

// patience limits waits for events that take milliseconds, and much longer on an emulated machine.
const patience = time.Minute

// New makes a bed with the rules of the plain path, which lasts until the test ends.
func New(t *testing.T, pods int, more ...plain.Service) (*bed.Bed, *plain.Rules) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces and loads programs")
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	b, err := bed.New(ctx, pods)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
	})
	rules, err := b.Install(more...)
	if err != nil {
		t.Fatal(err)
	}
	return b, rules
}

// NewPair makes a pair of beds, each with the rules of the plain path, which last until the test ends.
func NewPair(t *testing.T, pods int, more ...plain.Service) (pair [2]*bed.Bed, rules [2]*plain.Rules) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces and loads programs")
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pair, err := bed.NewPair(ctx, pods, pods)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pair[0].Close(); err != nil {
			t.Fatal(err)
		}
	})
	for i := range pair {
		if rules[i], err = pair[i].Install(more...); err != nil {
			t.Fatal(err)
		}
	}
	return pair, rules
}

// Connect makes a TCP connection between the first two pods, which lasts until the test ends.
func Connect(t *testing.T, b *bed.Bed, is6 bool) (client, server *net.TCPConn) {
	t.Helper()
	return ConnectPods(t, b.Pods[0], b.Pods[1], b.Address(1, is6))
}

// ConnectPods makes a TCP connection from one pod to an address of another, which lasts until the test ends.
func ConnectPods(t *testing.T, from, to *lab.Host, address netip.Addr) (client, server *net.TCPConn) {
	t.Helper()
	return ConnectPodsAt(t, from, to, netip.AddrPortFrom(address, 0))
}

// ConnectPodsAt does the same with a port; 0: any.
func ConnectPodsAt(t *testing.T, from, to *lab.Host, at netip.AddrPort) (client, server *net.TCPConn) {
	t.Helper()
	l, err := to.Listen("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // nothing is lost
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := from.Dial(ctx, "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = c.Close(), s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// Carry sends a number of octets one way.
func Carry(from, to net.Conn, octets int, within time.Duration) error {
	end := time.Now().Add(within)
	_, _ = from.SetDeadline(end), to.SetDeadline(end)
	sent := make(chan error, 1)
	go func() {
		_, err := from.Write(make([]byte, octets))
		sent <- err
	}()
	n, err := io.ReadFull(to, make([]byte, octets))
	if err != nil {
		return fmt.Errorf("after %d of %d octets: %w", n, octets, errors.Join(err, <-sent))
	}
	return <-sent
}

// Exchange sends a number of octets there, and back.
func Exchange(a, b net.Conn, octets int) error {
	if err := Carry(a, b, octets, patience); err != nil {
		return err
	}
	return Carry(b, a, octets, patience)
}
