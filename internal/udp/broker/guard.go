package broker

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// A guard drops the datagrams of an offer that no socket takes, also while nobody holds the offer (hook.Guard). Sessions do not
// know of it, so it comes and goes without disturbing a lease. Only Apply begins and ends guards, and their counts belong to
// the offer.

// guard is an offer's guard.
type guard struct {
	hook      *attached
	number    int
	addresses []netip.AddrPort
}

// Unguarded lists offers whose datagrams pass to the stack although Apply was to have them dropped. The rest is in
// force. Apply with the same offers tries again.
type Unguarded struct {
	By map[string]error // by offer
}

func (u *Unguarded) Error() string {
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(u.By)) {
		texts = append(texts, fmt.Sprintf("drop the datagrams of %s for which there is no socket: %v", name, u.By[name]))
	}
	return strings.Join(texts, "; ")
}

// totals returns the number of datagrams that the guard has dropped so far.
func (g *guard) totals() (t Totals) {
	t.Count, _ = g.hook.Sum(g.number) // it fails if the program has gone, and its counters with it
	return t
}

// fits reports whether an offer wants exactly this guard. The caller holds mu.
func (g *guard) fits(b *Broker, offers []Offer, name string) bool {
	return slices.ContainsFunc(offers, func(o Offer) bool {
		return o.Name == name && o.Drop && b.hooks[o.Interface] == g.hook && slices.Equal(o.Addresses, g.addresses)
	})
}

// endGuards ends guards that do not fit the offers, before their programs go. Their counts stay with the offer.
func (b *Broker) endGuards(before map[string]*offered, offers []Offer) (failed map[string]error) {
	failed = map[string]error{}
	for name, o := range before {
		b.mu.Lock()
		g := o.guard
		stays := g == nil || g.fits(b, offers, name)
		goes := g != nil && b.hooks[o.Interface] != g.hook // the program goes, and with it all of its guards
		b.mu.Unlock()
		if stays {
			continue
		}
		if err := g.hook.Unguard(g.number); err != nil && !goes {
			failed[name] = err
			continue
		}
		b.mu.Lock()
		o.past.all.Add(g.totals())
		o.guard = nil
		b.mu.Unlock()
		if err := g.hook.End(g.number); err != nil && !goes {
			failed[name] = err
		}
	}
	return failed
}

// beginGuards begins the missing guards.
func (b *Broker) beginGuards(failed map[string]error) {
	for name, o := range b.offers { // written only with applying held
		h := b.hooks[o.Interface]
		if !o.Drop || o.guard != nil || h == nil {
			continue
		}
		g, err := newGuard(h, o.Addresses)
		if err != nil {
			failed[name] = err
			continue
		}
		b.mu.Lock()
		o.guard = g
		b.mu.Unlock()
	}
}

func newGuard(h *attached, addresses []netip.AddrPort) (*guard, error) {
	number, err := h.Begin()
	if err != nil {
		return nil, err
	}
	if err := h.Guard(number, addresses...); err != nil {
		_ = h.End(number)
		return nil, err
	}
	return &guard{hook: h, number: number, addresses: addresses}, nil
}
