package ping

import "net/netip"

// teller is a host that has reported its balancers' stamps.
type teller struct {
	address netip.Addr
	order   int // in which tellers were met, from 1
	stamps  uint64
	clock   clock
}

// tellersMax is the number of tellers that a client remembers: any host may send it stamps.
const tellersMax = 16

// Teller is a host that reported its balancers' stamps to a client.
type Teller struct {
	Address netip.Addr `json:"address"`
	Stamps  uint64     `json:"stamps"`
}

// teller returns the teller with the address; nil: there are too many.
func (c *client) teller(address netip.Addr) *teller {
	for _, one := range c.tellers {
		if one.address == address {
			return one
		}
	}
	if len(c.tellers) == tellersMax {
		return nil
	}
	c.tellers = append(c.tellers, &teller{address: address, order: len(c.tellers) + 1})
	return c.tellers[len(c.tellers)-1]
}

// takeStamp takes one program's stamp of the probe or of its answer. The account of a probe has room for the stamps of
// one host, and for one program there in each direction. isNews reports whether this changes the account.
//
// A program that did not let the probe go on is shown rather than others; of hosts, the one that was met first; of
// programs on one host, whose times are of one clock, the one that is next to the client.
func (p *pending) takeStamp(from *teller, s stampEntry) (isNews bool) {
	at := &p.stamps[number(s.isAnswer)]
	switch {
	case p.teller == nil || p.teller == from && at.begin == 0:
		p.teller, *at = from, s.stamp
		return true
	case p.teller == from && *at == s.stamp: // the network brought it twice
		return false
	case p.teller == from:
		p.unshown++
		isNext := (s.begin < at.begin) != s.isAnswer
		if isNews = s.isRather(*at, isNext); isNews {
			*at = s.stamp
		}
		return isNews
	}
	ending := p.stamps[0]
	if p.stamps[1].ends() {
		ending = p.stamps[1]
	}
	if !s.isRather(ending, from.order < p.teller.order) {
		p.unshown++
		return false
	}
	p.unshown += uint32(p.stampCount())
	p.stamps = [2]stamp{}
	p.teller, p.stamps[number(s.isAnswer)] = from, s.stamp
	return true
}

// isRather reports whether a stamp is shown rather than another one.
func (s stamp) isRather(than stamp, isNext bool) bool {
	if s.ends() != than.ends() {
		return s.ends()
	}
	return isNext
}
