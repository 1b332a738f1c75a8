package vdisk

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Both joins a recording of the host with one of its guest.
type Both struct {
	Host     *Report
	Guest    *Recording
	Clock    Clock
	Disks    map[string]int // the host's disk, by the guest's disk
	Requests []InsideRequest
	Sum      BothSum
}

// BothSum has the numbers of both recordings.
type BothSum struct {
	Requests uint64            `json:"requests"` // of the guest to its drivers
	Joined   uint64            `json:"joined"`
	Missing  map[string]uint64 `json:"missing"` // by reason: requests of the guest without one of the host
	Alone    map[string]uint64 `json:"alone"`   // by reason: requests of the host without one of the guest
	Extents  map[string]uint64 `json:"guest_extents"`
	Total    Spread            `json:"total"` // of joined requests
	Layers   map[string]Spread `json:"layers"`
	Parts    []Part            `json:"parts,omitempty"`  // of layers with probes
	Passes   []Passes          `json:"passes,omitempty"` // of the guest's probes
}

// The reasons why requests are not joined.
const (
	otherDisk    = "no disk of the host's recording is the guest's disk"
	otherKind    = "the host's recording has no requests of its kind (discard and the like)"
	beforeHost   = "it was before the host's recording"
	afterHost    = "it was after the host's recording"
	noneInTime   = "no request of the host has its address in its time"
	manyInTime   = "more than one request of the host has its address in its time"
	hostUnended  = "the end of the host's request is not in the recording"
	beforeGuest  = "it was before the guest's recording"
	afterGuest   = "it was after the guest's recording"
	noneOfGuest  = "no request of the guest has its address in its time"
	diskOfOthers = "its disk is not one of the guest's disks in the recording"
)

// Join joins the recordings of a host and of its guest, in either order.
func Join(a, b *Recording) (*Both, error) {
	host, guest := a, b
	if host.isGuest() {
		host, guest = b, a
	}
	if host.isGuest() || !guest.isGuest() {
		return nil, errors.New("join two recordings: one must be of the host, and one of the guest (`shunt diag vdisk record --guest`)")
	}
	if host.isBare() {
		return nil, errors.New("join two recordings: the host's has no requests of the device model, because their sensors were not attached")
	}
	var disks []Disk
	if host.Tail != nil {
		disks = host.Tail.Disks
	}
	j := join(host.Events, disks, false)
	both := &Both{Host: report(host, j), Guest: guest, Disks: map[string]int{}}
	all, told := insideRequests(guest)
	both.Requests = told
	bounds := boundsOf(all, j.requests)
	_, those, ok := vote(bounds)
	those = certain(those)
	if !ok || len(those) == 0 {
		if len(bounds) == 0 {
			return nil, errors.New("join two recordings: they have no request in common, by operation, address and length. Record the same machine at the same time")
		}
		return nil, errors.New("join two recordings: the difference of the two clocks is uncertain, because the same requests come again and again. Record for longer, with other work")
	}
	m := &matcher{disks: map[uint32]uint64{}, used: map[int][]int{}}
	m.mapDisks(those)
	those = slices.DeleteFunc(those, func(b bound) bool { d, is := m.disks[b.guest.device]; return !is || d != b.host.disk })
	if both.Clock, ok = fit(those); !ok {
		return nil, fmt.Errorf("join two recordings: a clock was set, or the machine was stopped, between them: %d requests contradict each other by %.1f us", len(those), -2*both.Clock.Error/1000)
	}
	m.clock = both.Clock
	m.match(all, j.requests, both)
	both.sum(all, j.requests, m)
	return both, nil
}

func (rec *Recording) isGuest() bool { return rec.Head.Kind == KindGuest }

// matcher finds the host's requests for requests of the guest.
type matcher struct {
	clock Clock
	disks map[uint32]uint64 // by the guest's device: qemu's disk
	used  map[int][]int     // by the host's request: the guest's requests
}

// mapDisks takes, for each disk of the guest, the host's disk with which most requests agree.
func (m *matcher) mapDisks(those []bound) {
	type pair struct {
		device uint32
		disk   uint64
	}
	counts := map[pair]int{}
	var pairs []pair
	for _, b := range those {
		p := pair{b.guest.device, b.host.disk}
		if counts[p]++; counts[p] == 1 {
			pairs = append(pairs, p)
		}
	}
	slices.SortStableFunc(pairs, func(a, b pair) int { return counts[b] - counts[a] })
	taken := map[uint64]bool{}
	for _, p := range pairs {
		if _, is := m.disks[p.device]; !is && !taken[p.disk] {
			m.disks[p.device], taken[p.disk] = p.disk, true
		}
	}
}

// match joins unambiguous requests: a request of the host that lies within the guest's, by its disk, operation and
// address, and by its time. qemu may have made one request of several.
func (m *matcher) match(guest []*inside, host []*request, both *Both) {
	order := make([]int, 0, len(host)) // of the host's requests, by their beginning
	last := uint64(0)
	for i, h := range host {
		order = append(order, i)
		last = max(last, h.begin, h.end)
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(host[a].begin, host[b].begin) })
	found := make([]int, len(guest))
	for n, g := range guest {
		found[n] = -1
		t := &both.Requests[n]
		if t.Missing != "" {
			continue
		}
		from, to := m.window(g)
		disk, is := m.disks[g.device]
		switch {
		case !is:
			t.Missing = otherDisk
			continue
		case g.op == uint8(vdiskVdiskOpVDISK_OTHER):
			t.Missing = otherKind
			continue
		}
		begin, _ := slices.BinarySearchFunc(order, from, func(i int, at uint64) int { return cmp.Compare(host[i].begin, at) })
		fits := 0
		for _, i := range order[begin:] {
			h := host[i]
			if h.begin > to {
				break
			}
			if h.disk == disk && h.op == g.op && h.covers(g) && h.end <= to {
				fits++
				found[n] = i
			}
		}
		switch {
		case fits == 0 && to < host[order[0]].begin:
			t.Missing = beforeHost
		case fits == 0 && from > last:
			t.Missing = afterHost
		case fits == 0:
			t.Missing = noneInTime
		case fits > 1:
			found[n], t.Missing = -1, manyInTime
		case host[found[n]].end == 0:
			found[n], t.Missing = -1, hostUnended
		default:
			m.used[found[n]] = append(m.used[found[n]], n)
		}
	}
	for i, those := range m.used {
		if !m.share(host[i], guest, those) {
			for _, n := range those {
				found[n], both.Requests[n].Missing = -1, manyInTime
			}
			delete(m.used, i)
		}
	}
	for n, i := range found {
		if i >= 0 {
			m.put(&both.Requests[n], guest[n], host[i], both.Host.Requests[i], len(m.used[i]) > 1)
		}
	}
}

// window returns the guest's time in the driver and below, on the host's clock, and its largest error.
func (m *matcher) window(g *inside) (from, to uint64) {
	wrong := uint64(m.clock.Error) + 1
	from, to = m.clock.host(g.issued), m.clock.host(g.completed)
	return from - min(from, wrong), to + wrong
}

// covers reports whether the request's bytes are in the host's one. A flush has none.
func (r *request) covers(g *inside) bool {
	return r.offset <= g.sector*512 && g.sector*512+g.bytes <= r.offset+r.bytes
}

// share reports whether the host's request can be all of the guest's: no byte belongs to two.
func (m *matcher) share(h *request, guest []*inside, those []int) bool {
	if len(those) > 1 && h.bytes == 0 {
		return false // a flush is one request
	}
	parts := slices.Clone(those)
	slices.SortFunc(parts, func(a, b int) int { return cmp.Compare(guest[a].sector, guest[b].sector) })
	for i := 1; i < len(parts); i++ {
		if before := guest[parts[i-1]]; guest[parts[i]].sector < before.sector+before.bytes/512 {
			return false
		}
	}
	return true
}

// put adds the host's half. The clock's error can make one of the two directions of virtio negative: then the other
// one has its time.
func (m *matcher) put(t *InsideRequest, g *inside, h *request, told Request, shared bool) {
	t.Host, t.Shared = &told, shared
	below := t.Layers[insideBelow]
	delete(t.Layers, insideBelow)
	issued := m.clock.host(g.issued)
	down := h.begin - min(h.begin, issued)
	ways := below - min(below, told.Ns)
	down = min(down, ways)
	t.Layers[insideDown], t.Layers[insideUp] = down, ways-down
	for name, ns := range told.Layers {
		t.Layers[name] = ns
	}
	delete(t.Parts, insideBelow)
	maps.Copy(t.Parts, told.Parts)
	if told.Ns > below { // by less than the clocks' drift in that time
		t.Ns += told.Ns - below
	}
}

func (b *Both) sum(guest []*inside, host []*request, m *matcher) {
	s := &b.Sum
	s.Missing, s.Alone, s.Extents = map[string]uint64{}, map[string]uint64{}, map[string]uint64{}
	var joined []InsideRequest
	first, last := uint64(0), uint64(0)
	for n, t := range b.Requests {
		s.Requests++
		if len(t.Files) > 0 {
			s.Extents[t.Extents]++
		}
		if from, to := m.window(guest[n]); guest[n].completed != 0 {
			if first == 0 {
				first = from
			}
			first, last = min(first, from), max(last, to)
		}
		if t.Host == nil {
			s.Missing[t.Missing]++
			continue
		}
		s.Joined++
		joined = append(joined, t)
		b.Disks[t.Disk] = t.Host.Disk
	}
	disks := map[uint64]bool{}
	for _, d := range m.disks {
		disks[d] = true
	}
	for i, h := range host {
		switch {
		case len(m.used[i]) > 0:
		case !disks[h.disk]:
			s.Alone[diskOfOthers]++
		case h.end < first:
			s.Alone[beforeGuest]++
		case h.begin > last:
			s.Alone[afterGuest]++
		default:
			s.Alone[noneOfGuest]++
		}
	}
	s.Total, s.Layers = sumLayers(allLayers(), joined)
	s.Parts, s.Passes = sumParts(allLayers(), probeNames(b.Guest, b.Host.Recording), partsOf(joined)), countPasses(b.Guest, passesOf(guest))
}

// Slow returns the layer in which requests were longest; "": there are none.
func (s BothSum) Slow() string { return slow(s.Layers) }
