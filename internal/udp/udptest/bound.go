package udptest

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// NeedsBoundRings skips a test if BoundRings returns false.
func NeedsBoundRings(t testing.TB, host *lab.Host) {
	t.Helper()
	if !BoundRings(t, host) {
		t.Skip("needs a kernel that maps the rings of a socket which is bound: a later broker has to")
	}
}

// BoundRings reports whether the kernel maps the rings of a socket that is bound. Linux 6.1 does not, so there a lease ends when a
// later broker comes, instead of going on. The host has an interface eth0, whose queue 0 is free.
func BoundRings(t testing.TB, host *lab.Host) bool {
	t.Helper()
	ifindex, err := host.InterfaceIndex("eth0")
	if err == nil {
		err = host.Run(func() error { return adoptBound(ifindex) })
	}
	if err != nil && !errors.Is(err, unix.EBUSY) {
		t.Fatal(err)
	}
	return err == nil
}

func adoptBound(ifindex int) (err error) {
	plan, err := xsk.Plan(xsk.RingSizeMin, 2048, false)
	if err != nil {
		return err
	}
	memory, err := xsk.NewMemory(plan.Size())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	socket, err := xsk.Prepare(ifindex, 0, plan, memory)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, socket.Close()) }()
	if err := socket.Bind(xsk.Copy, 10*time.Second); err != nil {
		return err
	}
	again, err := unix.Dup(socket.FD())
	if err != nil {
		return err
	}
	second, err := xsk.Adopt(again, socket.Layout, memory)
	if err != nil {
		return errors.Join(err, unix.Close(again))
	}
	return second.Close()
}
