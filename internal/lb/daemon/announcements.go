package daemon

import (
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/announce"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/datapath/upgrade"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// location is an address on an interface that answers for it.
type location struct {
	addr  netip.Addr
	iface int
}

// announcer tells the network where an address is; see announce.Announcer.
type announcer interface {
	Announce(addr netip.Addr, iface int)
	StandBy(addr netip.Addr, iface int)
	Withdraw(addr netip.Addr, iface int) error
	Close(keep bool) error
}

// announcements keeps the announced addresses in agreement with the configuration. One caller at a time may use
// it.
type announcements struct {
	announcer  announcer
	err        error                           // why nothing can be announced
	find       func(name string) (link, error) // findLink
	tell       func([]netip.Prefix)            // called with the networks of the interfaces; nil: it is not called
	told       bool
	services   model.Differ
	vips       map[netip.Addr]int   // number of frontends that are to be announced at an address
	standbys   map[netip.Addr]int   // number of frontends for which this host stands by, at an address
	interfaces map[netip.Addr][]int // the interfaces on which an address is announced
	waiting    map[netip.Addr]bool  // the addresses in interfaces for which this host stands by

	// The input of the last call of want.
	links   []link
	sources []netip.Addr
	own     map[netip.Addr]bool
}

// newAnnouncements returns announcements that have announced nothing yet. own tells the data plane whether it
// may answer for an address.
func newAnnouncements(own func(netip.Addr, store.Owned) error, conditions *condition.Set, log *slog.Logger) *announcements {
	made, err := announce.New(announce.Options{
		Own: func(addr netip.Addr, iface int) error {
			log.Info("answering for address", "address", addr, "ifindex", iface)
			return own(addr, store.OwnedForever)
		},
		Disown:     func(addr netip.Addr, _ int) error { return own(addr, store.OwnedNever) },
		Conditions: conditions,
		Log:        log,
	})
	return &announcements{announcer: made, err: err, find: findLink, vips: map[netip.Addr]int{}, standbys: map[netip.Addr]int{},
		interfaces: map[netip.Addr][]int{}, waiting: map[netip.Addr]bool{}}
}

// findLink looks an interface up.
func findLink(name string) (link, error) {
	found, err := net.InterfaceByName(name)
	if err != nil {
		return link{}, err
	}
	l := link{index: found.Index}
	addrs, _ := found.Addrs() // // without addresses it is in no network
	for _, a := range addrs {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			l.networks = append(l.networks, prefix)
		}
	}
	return l, nil
}

// want announces the addresses that the configuration asks for, and withdraws all others. VIPs with `announce:
// l2` and NAT sources are announced, unless the host itself has them. This host stands by for VIPs whose frontends are all standbys. No two
// services may have the same name.
// While interfaces, sources and the host's addresses stay the same, a call costs as much as the changed
// services.
func (a *announcements) want(interfaces []model.Interface, services []*model.Service, sources []netip.Addr, own map[netip.Addr]bool) error {
	if a.err != nil {
		return a.err
	}
	var links []link
	for _, i := range interfaces {
		if l, err := a.find(i.Name); err == nil { // otherwise it has gone, which is a condition elsewhere
			links = append(links, l)
		}
	}
	touched := a.follow(services)
	if a.tell != nil && (!a.told || !slices.EqualFunc(links, a.links, link.equal)) {
		a.told = true
		a.tell(networksOf(links))
	}
	if !slices.EqualFunc(links, a.links, link.equal) || !slices.Equal(sources, a.sources) || !maps.Equal(own, a.own) {
		a.links, a.sources, a.own = links, slices.Clone(sources), maps.Clone(own)
		for addr := range a.vips {
			touched[addr] = true
		}
		for addr := range a.standbys {
			touched[addr] = true
		}
		for _, addr := range sources {
			touched[addr] = true
		}
		for addr := range a.interfaces {
			touched[addr] = true
		}
	}
	var errs []error
	for addr := range touched {
		var wanted []int
		announced := a.vips[addr] > 0 || slices.Contains(a.sources, addr)
		if (announced || a.standbys[addr] > 0) && !own[addr] {
			for _, l := range on(addr, links) {
				wanted = append(wanted, l.index)
			}
		}
		had := a.interfaces[addr]
		for _, iface := range had {
			if !slices.Contains(wanted, iface) {
				errs = append(errs, a.announcer.Withdraw(addr, iface))
			}
		}
		for _, iface := range wanted {
			switch same := slices.Contains(had, iface) && a.waiting[addr] == !announced; {
			case same:
			case announced:
				a.announcer.Announce(addr, iface)
			default:
				a.announcer.StandBy(addr, iface)
			}
		}
		if a.interfaces[addr], a.waiting[addr] = wanted, !announced; len(wanted) == 0 {
			delete(a.interfaces, addr)
			delete(a.waiting, addr)
		}
	}
	return errors.Join(errs...)
}

// follow counts the frontends that are to be announced, and returns the addresses of the services that have changed.
func (a *announcements) follow(services []*model.Service) (touched map[netip.Addr]bool) {
	touched = map[netip.Addr]bool{}
	count := func(all []*model.Service, sign int) {
		for _, s := range all {
			counts := a.vips
			switch s.Announce {
			case model.AnnounceStandby:
				counts = a.standbys
			case model.AnnounceNone:
				continue
			}
			for _, f := range s.Frontends {
				touched[f.Address] = true
				if counts[f.Address] += sign; counts[f.Address] == 0 {
					delete(counts, f.Address)
				}
			}
		}
	}
	gone, come := a.services.Next(services)
	count(gone, -1)
	count(come, 1)
	return touched
}

// link is an interface that addresses can be announced on.
type link struct {
	index    int
	networks []netip.Prefix
}

func (l link) equal(o link) bool { return l.index == o.index && slices.Equal(l.networks, o.networks) }

// networksOf returns the networks of interfaces, each once, without the link-local network of each link.
func networksOf(links []link) (all []netip.Prefix) {
	for _, l := range links {
		for _, n := range l.networks {
			if n = n.Masked(); !n.Addr().IsLinkLocalUnicast() && !slices.Contains(all, n) {
				all = append(all, n)
			}
		}
	}
	return all
}

// on returns the interfaces on which an address is announced: the links whose network contains it, or all links
// if no network does.
func on(addr netip.Addr, links []link) []link {
	within := slices.DeleteFunc(slices.Clone(links), func(l link) bool {
		return !slices.ContainsFunc(l.networks, func(p netip.Prefix) bool { return p.Contains(addr) })
	})
	if len(within) > 0 {
		return within
	}
	return links
}

func (a *announcements) close(keep bool) error {
	if a.err != nil {
		return nil
	}
	return a.announcer.Close(keep)
}

// leftAnnounced returns the locations where a killed daemon's data plane may still be announced: every address
// of the instance, on every interface that it is attached to.
func leftAnnounced(instance string, log *slog.Logger) []location {
	view, err := datapath.OpenReadOnly(store.Options{Instance: instance})
	if errors.Is(err, upgrade.ErrOtherABI) {
		log.Warn("cannot leave the multicast groups that were joined for the VIPs, because only the version of shunt that made the data plane knows the VIPs; `ip maddr` lists groups", "error", err)
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
	attachments, err := attach.Attachments(view)
	if err != nil {
		return nil
	}
	var left []location
	for addr, record := range contents.Addresses {
		if record.HostOwn {
			continue
		}
		for _, a := range attachments {
			if a.Mode == "" { // not in this namespace; an interface of this name is another one
				continue
			}
			if found, err := net.InterfaceByName(a.Interface); err == nil {
				left = append(left, location{addr, found.Index})
			}
		}
	}
	return left
}

// withdraw leaves the multicast groups that were joined for addresses of a data plane that is gone.
func withdraw(locations []location, log *slog.Logger) error {
	if len(locations) == 0 {
		return nil
	}
	nothing := func(netip.Addr, int) error { return nil }
	announcer, err := announce.New(announce.Options{Own: nothing, Disown: nothing, Log: log})
	if err != nil {
		return err
	}
	errs := []error{}
	for _, p := range locations {
		errs = append(errs, announcer.Withdraw(p.addr, p.iface))
	}
	return errors.Join(append(errs, announcer.Close(false))...)
}
