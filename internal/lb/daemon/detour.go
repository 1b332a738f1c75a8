package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/detour"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/record"
)

const detourSuffix = ".checks"

// detourRecord describes the path of health checks with direct return that a daemon has made and has to remove.
type detourRecord struct {
	Space  string `json:"space"` // the network namespace it is in
	Number uint8  `json:"number"`
}

func detourPath(instance string) string {
	return filepath.Join(node.RunDirectory, instance+detourSuffix)
}

func readDetour(instance string) (r detourRecord, err error) {
	path := detourPath(instance)
	if err := record.Read(path, &r); err != nil {
		return r, fmt.Errorf("read the record of the device that health checks use: %w; undo by hand the device and rules that `ip link` and `ip rule` show, then delete %s", err, path)
	}
	return r, nil
}

// checkProgram is the data plane's program for a detour.
type checkProgram struct{ *store.Checks }

func (p checkProgram) Name(socket uintptr, t detour.Target) error {
	return p.Checks.Name(socket, t.Backend, t.Forwarding, store.Hop{Interface: t.Interface, MAC: t.MAC})
}

// marked makes connections to VIPs that the data plane's program sends to a chosen backend; see detour.Detour.
type marked interface {
	Prepare(vips []netip.Addr)
	Dial(ctx context.Context, network string, t detour.Target) (net.Conn, error)
	Close() error
}

// directPath makes checks with direct return take the path of clients' packets, through the same next hops.
type directPath struct {
	marked
	hop func(backend netip.Addr) (store.Hop, bool)
	// hasVIPs reports whether this host has the VIPs itself, because it is a backend, too.
	hasVIPs func() bool
	own     func() (map[netip.Addr]bool, error) // hostAddresses
}

// prepare sets up the path for services, before they are checked.
func (w directPath) prepare(services []*model.Service) {
	var vips []netip.Addr
	for _, s := range services {
		if s.Health.Check != "" && s.Forwarding.Direct() {
			for _, f := range s.Frontends {
				vips = append(vips, f.Address)
			}
		}
	}
	w.Prepare(vips)
}

// dial implements health.DialDirect.
func (w directPath) dial(ctx context.Context, network string, vip netip.AddrPort, backend netip.Addr, forwarding model.Forwarding) (net.Conn, error) {
	if w.hasVIPs() {
		if at, ok := besideServer(w.own, vip, backend); ok {
			dialer := net.Dialer{KeepAlive: -1}
			return dialer.DialContext(ctx, network, at.String())
		}
	}
	hop, err := w.awaitHop(ctx, backend)
	if err != nil {
		return nil, err
	}
	return w.Dial(ctx, network, detour.Target{VIP: vip, Backend: backend, Forwarding: forwarding, Interface: hop.Interface, MAC: hop.MAC})
}

// besideServer returns the destination of a check of a backend if this host has the VIP, so that its own kernel
// would answer for all backends: this host's own server is checked at the VIP, and the other servers at their
// own addresses. ok reports whether this host has the VIP.
func besideServer(list func() (map[netip.Addr]bool, error), vip netip.AddrPort, backend netip.Addr) (at netip.AddrPort, ok bool) {
	own, err := list()
	if err != nil || !own[vip.Addr()] {
		return vip, false
	}
	if own[backend] {
		return vip, true
	}
	return netip.AddrPortFrom(backend, vip.Port()), true
}

// awaitHop waits until the next hop of a backend, which may be new, is known, or until ctx ends.
func (w directPath) awaitHop(ctx context.Context, backend netip.Addr) (store.Hop, error) {
	for wait := 5 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		if hop, ok := w.hop(backend); ok {
			return hop, nil
		}
		select {
		case <-ctx.Done():
			return store.Hop{}, errors.New("the next hop does not answer ARP or neighbour solicitations, or there is no route")
		case <-time.After(wait):
		}
	}
}

// openDetour opens the path of an instance's health checks with direct return. It first removes the path of a
// killed daemon, because that path's program may belong to another data plane by now.
func openDetour(dp *datapath.Datapath, instance string, log *slog.Logger) (*detour.Detour, error) {
	if err := releaseDetour(instance, log); err != nil {
		log.Warn("cannot remove the device and rules that an earlier daemon made for its health checks", "error", err)
	}
	space, err := host.Space()
	if err != nil {
		return nil, err
	}
	return detour.New(detour.Options{
		Instance: instance, Mark: store.CheckMark,
		Load: func() (detour.Program, error) {
			checks, err := dp.LoadChecks()
			return checkProgram{checks}, err
		},
		Note: func(number uint8) error {
			if err := record.Write(detourPath(instance), detourRecord{Space: space, Number: number}); err != nil {
				return fmt.Errorf("record the device that health checks use: %w", err)
			}
			return nil
		},
	}), nil
}

// releaseDetour removes the things that a daemon has made for its health checks.
func releaseDetour(instance string, log *slog.Logger) error {
	path := detourPath(instance)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	r, err := readDetour(instance)
	if err != nil {
		return err
	}
	here, err := host.Space()
	if err != nil {
		return err
	}
	found, err := inSpace(r.Space, here, func() error { return detour.Remove(instance, r.Number, store.CheckMark(r.Number)) })
	if err != nil {
		return err // the record stays, for another try
	}
	if !found {
		log.Warn("the device of health checks stays in another network namespace, if that namespace still exists",
			"device", detour.Device(r.Number), "namespace", r.Space)
	}
	return os.Remove(path)
}
