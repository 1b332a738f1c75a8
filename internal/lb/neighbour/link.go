package neighbour

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Clients on the link, and gateways beyond the kept ones: the kernel knows the neighbours to which the host
// itself has sent something, and the data plane believes it. Other neighbours have no entry: their
// packets show where they are. So the kernel is made to probe each neighbour on an attached interface that has
// been silent for a while, with the kernel's own timers: after three questions to the known hardware address
// without an answer the entry has failed, and the data plane stops using it.
const (
	// freshFor is how long an answer is trusted.
	freshFor = 5 * time.Second
	// probesPerSecond limits the probes of neighbours; with more than five times as many neighbours, the
	// longest silent come first, and a round takes longer.
	probesPerSecond = 100
	// probeEvery is the time between two turns of probes.
	probeEvery = 500 * time.Millisecond
	// A table that has more entries than the kernel always keeps (gc_thresh1, 128 unless changed) loses
	// entries that were neither used nor confirmed for gc_stale_time, a minute. Probing would keep
	// all of them for ever. So in such a table each entry is left alone for two minutes in twelve.
	probedFor = 10 * time.Minute
	leftFor   = 2 * time.Minute
)

// probing is the state of neighbours that are probed.
type probing struct {
	met       map[key]time.Time // the time of each neighbour's first or last probe
	collected map[int]bool      // tables from which the kernel removes unused entries, by family
	last      time.Time         // time of the last turn of probes
}

// probeNeighbours makes the kernel check whether neighbours on attached interfaces still exist.
func (w *Watcher) probeNeighbours(now time.Time) {
	p := &w.probing
	elapsed := min(now.Sub(p.last), time.Second)
	if len(w.attached) == 0 || elapsed < probeEvery {
		return
	}
	table, err := w.listSince(p.last)
	if err != nil {
		w.opts.Log.Debug("neighbours of clients are not probed", "error", err)
		return
	}
	p.last = now
	most := int(probesPerSecond * elapsed / time.Second)
	due := p.due(table, func(k key) bool { return w.attached[k.iface] && w.asking[k] == nil }, now)
	for _, k := range due[:min(len(due), most)] {
		if err := w.neigh.probe(k); err != nil && !errors.Is(err, unix.ENOENT) {
			w.opts.Log.Debug("cannot make the kernel probe a neighbour", "neighbour", k, "error", err)
		}
	}
}

// due returns the neighbours to be probed, the longest silent first.
func (p *probing) due(table map[key]entry, meant func(key) bool, now time.Time) (due []key) {
	met := make(map[key]time.Time, len(p.met))
	for k, e := range table {
		if !meant(k) || e.kept() || e.state&(netlink.NUD_REACHABLE|netlink.NUD_STALE) == 0 || len(e.mac) != 6 {
			continue
		}
		since, known := p.met[k]
		if !known || now.Sub(since) >= probedFor+leftFor {
			since = now
		}
		met[k] = since
		left := p.collected[family(k.addr)] && now.Sub(since) >= probedFor
		if !left && e.confirmed >= freshFor {
			due = append(due, k)
		}
	}
	p.met = met
	slices.SortFunc(due, func(a, b key) int {
		return cmp.Or(cmp.Compare(table[b].confirmed, table[a].confirmed), cmp.Compare(a.iface, b.iface), a.addr.Compare(b.addr))
	})
	return due
}

// listSince returns the kernel's table, read after a moment: an older table would show neighbours as silent
// that have been probed since.
func (w *Watcher) listSince(t time.Time) (map[key]entry, error) {
	if w.listedAt.After(t) {
		return w.listed, nil
	}
	table, err := w.neigh.list()
	if err == nil {
		w.listed, w.listedAt = table, time.Now()
	}
	return table, err
}
