package daemon

import (
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"

	"github.com/shunt-lb/shunt/internal/announce"
	"github.com/shunt-lb/shunt/internal/datapath"
	"github.com/shunt-lb/shunt/internal/model"
)

// place is an address on an interface that answers for it.
type place struct {
	addr  netip.Addr
	iface int
}

// announcements keeps what is announced where agreeing with the configuration.
type announcements struct {
	announcer *announce.Announcer
	err       error

	mu     sync.Mutex
	places map[place]bool
}

func newAnnouncements(d *daemon) *announcements {
	a := &announcements{places: map[place]bool{}}
	a.announcer, a.err = announce.New(announce.Options{
		Own: func(addr netip.Addr, iface int) error {
			d.log.Info("answering for address", "address", addr, "ifindex", iface)
			return d.datapath.SetOwned(addr, true)
		},
		Disown:     func(addr netip.Addr, _ int) error { return d.datapath.SetOwned(addr, false) },
		Conditions: d.conditions,
		Log:        d.log,
	})
	return a
}

// want announces what the configuration asks for, and withdraws the rest. VIPs with
// `announce: l2` and NAT sources are announced, unless the host itself has them.
func (a *announcements) want(config model.Config, sources []netip.Addr, own map[netip.Addr]bool) error {
	if a.err != nil {
		return a.err
	}
	wanted := map[place]bool{}
	add := func(addr netip.Addr) {
		if own[addr] {
			return
		}
		for _, index := range announceOn(addr, config.Interfaces) {
			wanted[place{addr, index}] = true
		}
	}
	for _, service := range config.Services {
		if service.Announce != model.AnnounceL2 {
			continue
		}
		for _, frontend := range service.Frontends {
			add(frontend.Address)
		}
	}
	for _, source := range sources {
		add(source)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for p := range a.places {
		if !wanted[p] {
			errs = append(errs, a.announcer.Withdraw(p.addr, p.iface))
			delete(a.places, p)
		}
	}
	for p := range wanted {
		if !a.places[p] {
			a.announcer.Announce(p.addr, p.iface)
			a.places[p] = true
		}
	}
	return errors.Join(errs...)
}

// announceOn is where an address is announced: on the listed interfaces whose network
// contains it, or on all of them when none does.
func announceOn(addr netip.Addr, interfaces []model.Interface) []int {
	var all, within []int
	for _, i := range interfaces {
		link, err := net.InterfaceByName(i.Name)
		if err != nil {
			continue // requireInterfaces has passed it; it has gone since, and comes back as a condition
		}
		all = append(all, link.Index)
		addrs, err := link.Addrs()
		if err != nil {
			continue
		}
		for _, a := range addrs {
			if prefix, err := netip.ParsePrefix(a.String()); err == nil && prefix.Contains(addr) {
				within = append(within, link.Index)
				break
			}
		}
	}
	if len(within) > 0 {
		return within
	}
	return all
}

func (a *announcements) close(keep bool) error {
	if a.err != nil {
		return nil
	}
	return a.announcer.Close(keep)
}

// leftAnnounced is where a killed daemon's data plane may still be announced: every
// address of the instance, on every interface it is attached to.
func leftAnnounced(instance string, log *slog.Logger) []place {
	view, err := datapath.OpenReadOnly(datapath.Options{Instance: instance})
	if errors.Is(err, datapath.ErrOtherABI) {
		log.Warn("the multicast groups that were joined for the VIPs are not left, because only the version that runs them knows the VIPs; `ip maddr` lists groups", "error", err)
		return nil
	}
	if err != nil {
		return nil // nothing is loaded, so nothing was announced
	}
	defer view.Close() //nolint:errcheck // nothing was written
	contents, err := view.Contents()
	if err != nil {
		return nil
	}
	attachments, err := view.Attachments()
	if err != nil {
		return nil
	}
	var left []place
	for addr, record := range contents.Addresses {
		if record.HostOwn {
			continue
		}
		for _, a := range attachments {
			if a.Mode == "" { // not here; what is called so here is another interface
				continue
			}
			if link, err := net.InterfaceByName(a.Interface); err == nil {
				left = append(left, place{addr, link.Index})
			}
		}
	}
	return left
}

// withdraw leaves the groups that were joined for addresses of a data plane that is gone.
func withdraw(places []place, log *slog.Logger) error {
	if len(places) == 0 {
		return nil
	}
	nothing := func(netip.Addr, int) error { return nil }
	announcer, err := announce.New(announce.Options{Own: nothing, Disown: nothing, Log: log})
	if err != nil {
		return err
	}
	errs := []error{}
	for _, p := range places {
		errs = append(errs, announcer.Withdraw(p.addr, p.iface))
	}
	return errors.Join(append(errs, announcer.Close(false))...)
}
