package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/decap"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/realserver"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/record"
)

// A machine that is a balancer and a backend (docs/design/37-mesh.md):
//
//	bare, from a router ─► sh_xdp ─┬─► this machine is the flow's backend ─► stack, the VIP is on lo
//	                               └─► another machine is ─► outer headers ─► that machine
//	from another balancer ─► sh_xdp ─► sh_decap ─► stack
//
// Or a node of a cluster with direct return between nodes (docs/design/55-direct-return-in-a-cluster.md), whose stack and
// settings have no part in it:
//
//	from another node ─► sh_xdp ─► sh_decap ─► sh_tunnelled ─► pod

const serverSuffix = ".server"

// serverRecord lists the changes that one instance has made for this machine's own servers.
type serverRecord struct {
	Space string           `json:"space"` // the network namespace of the changes
	State realserver.State `json:"state"`
}

func serverPath(instance string) string {
	return filepath.Join(node.RunDirectory, instance+serverSuffix)
}

func readServer(instance string) (r serverRecord, err error) {
	path := serverPath(instance)
	if err := record.Read(path, &r); err != nil {
		return r, fmt.Errorf("read the changes made for this machine's own servers: %w; undo by hand the changes that `ip address show dev lo` and `sysctl -a` show, then delete %s", err, path)
	}
	return r, nil
}

// decapsulation makes this machine a backend of its own services with direct return. One caller at a time may
// use its methods, except for serves and doubt.
type decapsulation struct {
	instance string
	log      *slog.Logger
	beside   *decap.Beside
	state    realserver.State
	space    string

	inner   innerAddresses
	known   bool        // follow has stored served
	served  atomic.Bool // this machine is a backend
	onStack atomic.Bool // and its stack has the VIPs
	doubted atomic.Bool // interfaces were attached to since follow
}

func newDecapsulation(dp decap.DataPlane, instance string, log *slog.Logger) (*decapsulation, error) {
	space, err := host.Space()
	if err != nil {
		return nil, err
	}
	r, err := readServer(instance)
	if err != nil {
		return nil, err
	}
	if r.Space != "" && r.Space != space {
		if err := releaseServer(instance, log); err != nil {
			return nil, err
		}
		r = serverRecord{}
	}
	return &decapsulation{instance: instance, log: log, beside: decap.NewBeside(dp, log), space: space, state: r.State}, nil
}

// serves reports whether packets for backends with an address of this machine reach its stack as clients sent
// them.
func (d *decapsulation) serves() bool { return d.served.Load() }

// hasVIPs reports whether this machine has the VIPs of services with direct return itself.
func (d *decapsulation) hasVIPs() bool { return d.onStack.Load() }

// expect assumes until the first follow that this machine is a backend, if the configuration has decapsulation:
// interfaces are attached to before, and backends on this machine must not be called out of reach meanwhile.
func (d *decapsulation) expect(next *state.Snapshot) {
	if !d.known {
		d.served.Store(next.Decapsulation.Tunnelled || len(next.Decapsulation.From) > 0)
	}
}

// doubt makes the next follow load all programs again, because interfaces were attached to.
func (d *decapsulation) doubt() { d.doubted.Store(true) }

// follow makes the machine agree with the configuration. attached are the interfaces' attachments.
func (d *decapsulation) follow(next *state.Snapshot, attached []kernel.Attachment) error {
	from := next.Decapsulation
	wanted := decap.Wanted{Senders: from.From, GUEPort: next.Node.Encapsulation.GUEPort, Tunnelled: from.Tunnelled}
	switch {
	case from.Tunnelled:
		wanted.VIPs = d.inner.list(next.Configured, from.Nodes)
	case len(wanted.Senders) > 0:
		own, err := hostAddresses()
		if err != nil {
			return err
		}
		wanted.VIPs = ownVIPs(next.Configured, own)
	}
	var interfaces []string
	var atTC string
	for _, a := range attached {
		if !a.Mode.AtTC() {
			interfaces = append(interfaces, a.Interface)
		} else if atTC == "" {
			atTC = a.Interface
		}
	}
	// Of a cluster's node, those at tc are its pods'.
	if len(wanted.VIPs) > 0 && atTC != "" && (!wanted.Tunnelled || len(interfaces) == 0) {
		return fmt.Errorf("decapsulate on interface %s: it has attach: tc, and decapsulation is at XDP; use attach: native, generic or auto, or remove decapsulation", atTC)
	}
	onStack := len(wanted.VIPs) > 0 && !wanted.Tunnelled
	var err error
	if onStack { // the stack takes packets for the VIPs before it gets any
		d.state, err = realserver.Prepare(interfaces, wanted.VIPs, d.state, d.store)
	}
	if err == nil {
		err = d.beside.Follow(interfaces, wanted, d.doubted.Swap(false))
	}
	if err != nil {
		d.doubt()
		return fmt.Errorf("make this machine a backend of its own services: %w", err)
	}
	d.known = true
	d.served.Store(len(wanted.VIPs) > 0)
	d.onStack.Store(onStack)
	if !onStack {
		return d.restore()
	}
	return nil
}

// innerAddresses are the inner destinations of packets between the nodes of a cluster. Keeping them costs by the services that have
// changed.
type innerAddresses struct {
	services  model.Differ
	frontends map[netip.Addr]int // how many frontends of packets between nodes an address has
	nodes     []netip.Addr
	all       []netip.Addr // sorted, each once
}

// list returns the addresses of frontends of packets between nodes, and these addresses of nodes. It is not changed afterwards.
func (i *innerAddresses) list(services []*model.Service, nodes []netip.Addr) []netip.Addr {
	if i.frontends == nil {
		i.frontends = map[netip.Addr]int{}
	}
	differ := !slices.Equal(i.nodes, nodes)
	count := func(all []*model.Service, sign int) {
		for _, s := range all {
			for _, f := range s.Frontends {
				if !f.Tunnelled() || f.Address.IsUnspecified() {
					continue
				}
				differ = true
				if i.frontends[f.Address] += sign; i.frontends[f.Address] == 0 {
					delete(i.frontends, f.Address)
				}
			}
		}
	}
	gone, come := i.services.Next(services)
	count(gone, -1)
	count(come, 1)
	if differ {
		i.nodes = slices.Clone(nodes)
		i.all = slices.SortedFunc(maps.Keys(i.frontends), netip.Addr.Compare)
		i.all = append(i.all, nodes...)
		slices.SortFunc(i.all, netip.Addr.Compare)
		i.all = slices.Compact(i.all)
	}
	return i.all
}

// ownVIPs returns the VIPs of services with direct return that have one of these addresses as a backend,
// sorted.
func ownVIPs(services []*model.Service, own map[netip.Addr]bool) (vips []netip.Addr) {
	for _, s := range services {
		if !s.Forwarding.Direct() || !slices.ContainsFunc(s.Backends, func(b model.Backend) bool { return own[b.Address] }) {
			continue
		}
		for _, f := range s.Frontends {
			vips = append(vips, f.Address)
		}
	}
	slices.SortFunc(vips, netip.Addr.Compare)
	return slices.Compact(vips)
}

func (d *decapsulation) store(state realserver.State) error {
	if state.IsZero() {
		return record.Remove(serverPath(d.instance))
	}
	return record.Write(serverPath(d.instance), serverRecord{d.space, state})
}

// restore undoes the changes.
func (d *decapsulation) restore() (err error) {
	if d.state.IsZero() {
		return nil
	}
	d.state, err = d.state.Restore()
	return errors.Join(err, d.store(d.state))
}

// refresh follows the interfaces' addresses.
func (d *decapsulation) refresh() {
	if err := d.beside.Refresh(); err != nil {
		d.log.Warn("cannot read the interfaces' addresses; tunnels still end at the addresses that they had before", "error", err)
	}
}

// releaseServer undoes the changes that a daemon that is gone has made for this machine's own servers.
func releaseServer(instance string, log *slog.Logger) error {
	path := serverPath(instance)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	r, err := readServer(instance)
	if err != nil {
		return err
	}
	here, err := host.Space()
	if err != nil {
		return err
	}
	found, err := inSpace(r.Space, here, func() error {
		_, err := r.State.Restore()
		return err
	})
	if err != nil {
		return err // the record stays, for another try
	}
	if !found {
		log.Warn("VIPs stay on lo in another network namespace, if that namespace still exists", "namespace", r.Space)
	}
	return os.Remove(path)
}
