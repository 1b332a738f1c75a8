package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/shunt-lb/shunt/internal/value"
)

// iface is the balancer's only interface: clients and backends are both behind it.
const iface = "shunt-rem"

var (
	ownAddress = netip.MustParsePrefix("10.0.0.1/24")
	service    = netip.MustParseAddrPort("192.0.2.10:80") // RFC 5737
	ownMAC     = net.HardwareAddr{2, 0, 0, 0, 0x0a, 1}
	otherMAC   = net.HardwareAddr{2, 0, 0, 0, 0x0a, 2}
)

// backendAddress is the address of the i-th backend, from 0.
func backendAddress(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(10 + i)}) }

// timeouts are the defaults of a configuration without timeouts.
func timeouts(settle time.Duration) model.Timeouts {
	return model.Timeouts{TCPEstablished: 2*time.Hour + 4*time.Minute, TCPHandshake: 10 * time.Second,
		TCPClosing: 10 * time.Second, UDP: 5 * time.Minute, Settle: settle}
}

// halfClosed is the time for which an entry is kept after the client's FIN (RFC 5382, REQ-5).
const halfClosed = 4 * time.Minute

// world is a network namespace with a data plane and its reconciler. It belongs to the
// thread that made it.
type world struct {
	d          *datapath.Datapath
	reconciler *reconcile.Reconciler
	table      *table
	limits     model.Limits
	settle     time.Duration
	now        time.Time // the simulation's
	closers    []func() error
}

// inWorld makes a world, runs do in it and removes it. It locks the calling goroutine to its thread
// for good, so it must be the goroutine's last work with the network.
func inWorld(name string, o options, do func(*world) error) error {
	runtime.LockOSThread()
	// Nothing is to be lost for want of room: with these flows' lengths, a table of all of
	// them holds not quite 3.5 for each flow alive.
	remembered := uint32(1 << 10)
	for int(remembered) < 5*o.flows {
		remembered *= 2
	}
	w := &world{
		limits: model.Limits{Flows: 1024, Services: 4, Backends: 1024, Slots: 4 * o.tableSize, Remembered: remembered},
		settle: o.settle, now: time.Unix(0, 0),
	}
	err := w.open(fmt.Sprintf("shunt-rem-%s-%d", name, os.Getpid()))
	if err == nil {
		err = do(w)
	}
	return errors.Join(err, w.close())
}

func (w *world) open(name string) error {
	space, err := namespace.NewNamed(name)
	if err != nil {
		return fmt.Errorf("make the network namespace %s: %w", name, err)
	}
	w.closers = append(w.closers, func() error { return errors.Join(space.Close(), netns.DeleteNamed(name)) })
	if err := makeInterface(); err != nil {
		return fmt.Errorf("make the interface %s: %w", iface, err)
	}
	options := store.Options{Instance: name, Limits: w.limits, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	if w.d, err = datapath.Open(options); err != nil {
		return err
	}
	w.closers = append(w.closers, func() error { return errors.Join(w.d.Close(), attach.RemoveFrom(options)) })
	if _, err := w.d.Attach(iface, model.AttachNative); err != nil {
		return err
	}
	if err := w.d.SetSettings(timeouts(w.settle), value.PortRange{First: 1024, Last: 32767}); err != nil {
		return err
	}
	w.d.SetEncapsulation(model.Encapsulation{Sources4: netip.PrefixFrom(ownAddress.Addr(), 32)})
	w.reconciler = reconcile.New(w.d, reconcile.Clock(func() time.Time { return w.now }), reconcile.BeforeNaming(w.resolve))
	if w.table, err = openTable(name); err != nil {
		return err
	}
	w.closers = append(w.closers, w.table.close)
	return w.d.Heartbeat()
}

func makeInterface() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = iface, ownMAC
	veth := netlink.NewVeth(attrs)
	veth.PeerName = iface + "-peer"
	if err := netlink.LinkAdd(veth); err != nil {
		return err
	}
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return err
	}
	address, err := netlink.ParseAddr(ownAddress.String())
	if err != nil {
		return err
	}
	return errors.Join(netlink.AddrAdd(link, address), netlink.LinkSetUp(link))
}

// close undoes everything, last first.
func (w *world) close() error {
	var errs []error
	for i := len(w.closers) - 1; i >= 0; i-- {
		errs = append(errs, w.closers[i]())
	}
	return errors.Join(errs...)
}

// resolve sets the next hops of backends, before a slot names them.
func (w *world) resolve(records []reconcile.BackendRecord) {
	link, err := net.InterfaceByName(iface)
	if err != nil {
		return // then no packet leaves, which ends the run
	}
	for _, r := range records {
		_ = w.d.SetHop(r.BackendRef, store.Hop{Interface: link.Index, MAC: otherMAC})
	}
}

// apply makes these the backends.
func (w *world) apply(o options, backends []model.Backend) error {
	_, err := w.reconciler.Apply(reconcile.Desired{
		Services: []*model.Service{{
			Name: "web", Frontends: []model.Frontend{{Address: service.Addr(), Ports: value.PortRange{First: service.Port(), Last: service.Port()}, Protocol: model.TCP}},
			Forwarding: model.ForwardingDSRIPIP, Announce: model.AnnounceNone, TableSize: o.tableSize,
			Tracking: o.tracking, Backends: backends,
		}},
		Limits: w.limits, Settle: w.settle,
	})
	return err
}
