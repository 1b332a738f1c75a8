package vdisk

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
)

// FileRange is the part of a file where a part of a request is.
type FileRange struct {
	File   string `json:"file"`
	Offset uint64 `json:"offset"`
	Bytes  uint64 `json:"bytes"`
}

// Sector is the part of a disk where a part of a request is.
type Sector struct {
	Disk   string `json:"disk"`
	Sector uint64 `json:"sector"` // of 512 bytes
	Bytes  uint64 `json:"bytes"`
	Held   bool   `json:"held"` // by a cgroup's limit
	// File and Offset are its position in a file; "": not known.
	File   string `json:"file"`
	Offset uint64 `json:"offset"`
}

// Request is a request of the device model, from the guest's demand to its answer.
type Request struct {
	Number int    `json:"number"` // from 0, by their beginning
	Disk   int    `json:"disk"`   // of the machine, by their first request; -1: not known
	Op     string `json:"op"`     // read, write or flush; zero, of a file's request only
	Offset uint64 `json:"offset"` // bytes, in the virtual disk: the guest's block address
	Bytes  uint64 `json:"bytes"`
	// BeginNs is a time of CLOCK_BOOTTIME, and Ns a duration.
	BeginNs uint64            `json:"begin_ns"`
	Ns      uint64            `json:"ns"`
	Layers  map[string]uint64 `json:"layers_ns"` // they add up to Ns
	Parts   Parts             `json:"parts_ns,omitempty"`
	// Mapped has the places from `qemu-img map`, Files the places that qemu used, Sectors the places that the kernel used.
	Mapped  []FileRange `json:"mapped"`
	Files   []FileRange `json:"files"`
	Sectors []Sector    `json:"sectors"`
	// Offsets and Extents tell whether files were used as mapped, and sectors as the file system reports: same, other,
	// or unknown. Offsets are moved if a later write of the recording put a backing file's data where they are mapped.
	Offsets string `json:"offsets"`
	Extents string `json:"extents"`
	// Missing is the reason why it is not followed down to the disk; "": it is, or its path ends earlier.
	Missing string `json:"missing"`
	Ends    string `json:"ends"` // where its path down ends: device, page cache, hole of a file, or qemu
}

// Spread describes times in ns.
type Spread struct {
	Share float64 `json:"share_percent"` // of the time of all requests
	Mean  uint64  `json:"mean_ns"`
	P50   uint64  `json:"p50_ns"`
	P90   uint64  `json:"p90_ns"`
	P99   uint64  `json:"p99_ns"`
	Max   uint64  `json:"max_ns"`
	// Longest is the number of requests whose longest layer it is.
	Longest uint64 `json:"longest"`
}

// Sum has the numbers of a recording.
type Sum struct {
	Requests uint64            `json:"requests"`
	Joined   uint64            `json:"joined"`
	Missing  map[string]uint64 `json:"missing"` // by reason: requests that are not joined
	Ops      map[string]uint64 `json:"ops"`
	Ends     map[string]uint64 `json:"ends"`
	Offsets  map[string]uint64 `json:"offsets"` // requests with data in an image, against `qemu-img map`
	Extents  map[string]uint64 `json:"extents"` // requests with IO of a disk, against the files' extents
	Total    Spread            `json:"total"`
	Layers   map[string]Spread `json:"layers"`
	// Stray counts events of no request: qemu's own IO, or IO that began before the recording.
	Stray map[string]uint64 `json:"stray"`
	// Parts are the parts of layers with probes.
	Parts  []Part   `json:"parts,omitempty"`
	Passes []Passes `json:"passes,omitempty"`
}

// Report is a joined recording.
type Report struct {
	Recording *Recording
	Requests  []Request
	Sum       Sum
}

const (
	same    = "same"
	other   = "other"
	unknown = "unknown"
	moved   = "moved"

	endsInDevice = "device"
	endsInCache  = "page cache"
	endsInHole   = "hole of a file"
	endsInQemu   = "qemu"
)

var opNames = []string{"read", "write", "flush", "zero", "other"}

// Of joins a recording.
func Of(rec *Recording) *Report {
	tail := Tail{}
	if rec.Tail != nil {
		tail = *rec.Tail
	}
	return report(rec, join(rec.Events, tail.Disks, rec.isBare()))
}

// report returns the report of a joined recording.
func report(rec *Recording, j joined) *Report {
	tail := Tail{}
	if rec.Tail != nil {
		tail = *rec.Tail
	}
	w := &writer{tail: tail, disks: map[uint64]int{}, images: map[uint64]int{}, probes: rec.Head.Probes}
	w.findImages(j.requests)
	w.findWrites(j.requests)
	r := &Report{Recording: rec, Requests: []Request{}, Sum: Sum{Missing: map[string]uint64{}, Ops: map[string]uint64{}, Ends: map[string]uint64{}, Offsets: map[string]uint64{},
		Extents: map[string]uint64{}, Layers: map[string]Spread{}, Stray: map[string]uint64{"block": j.strayBlocks, "calls": j.strayCalls, "bios": j.strayBios, "parts": j.cutParts}}}
	for i, one := range j.requests {
		r.Requests = append(r.Requests, w.request(i, one))
	}
	r.sum()
	passes := map[uint64]uint64{}
	for _, one := range j.requests {
		for _, p := range one.passes {
			passes[p.probe]++
		}
	}
	r.Sum.Passes = countPasses(rec, passes)
	return r
}

// writer turns joined events into reported requests.
type writer struct {
	tail   Tail
	disks  map[uint64]int // by qemu's address: the number
	images map[uint64]int // by qemu's address: the file that is the disk's image
	writes map[spot][]*piece
	probes []string
}

// spot is a part of a file: spotBytes from a multiple of them on.
type spot struct {
	file string
	at   uint64
}

const spotBytes = 1 << 20

// findWrites finds the places of all writes.
func (w *writer) findWrites(requests []*request) {
	w.writes = map[spot][]*piece{}
	for _, r := range requests {
		for _, p := range r.pieces {
			if p.op != write && p.op != uint8(vdiskVdiskOpVDISK_ZERO) || p.bytes == 0 {
				continue
			}
			if i := fileOf(p, w.tail.Files); i >= 0 {
				for at := p.offset / spotBytes; at <= (p.offset+p.bytes-1)/spotBytes; at++ {
					s := spot{w.tail.Files[i].Path, at}
					w.writes[s] = append(w.writes[s], p)
				}
			}
		}
	}
}

// findImages finds for each disk the image whose chain has the files of its requests.
func (w *writer) findImages(requests []*request) {
	for _, r := range requests {
		if _, is := w.disks[r.disk]; !is && !r.isBare {
			w.disks[r.disk] = len(w.disks)
		}
		if _, is := w.images[r.disk]; is || r.isBare {
			continue
		}
		for _, p := range r.pieces {
			if i := fileOf(p, w.tail.Files); i >= 0 {
				w.images[r.disk] = w.top(i)
				break
			}
		}
	}
}

// top returns the image whose chain has a file.
func (w *writer) top(file int) int {
	for i, f := range w.tail.Files {
		if i != file && slices.Contains(f.Chain, w.tail.Files[file].Path) && len(f.Chain) > 1 && f.Chain[0] != w.tail.Files[file].Path {
			return w.top(i)
		}
	}
	return file
}

func (w *writer) name(device uint32) string {
	for _, d := range w.tail.Disks {
		if d.Device == device && d.Name != "" {
			return d.Name
		}
	}
	return fmt.Sprintf("%d:%d", device>>20, device&(1<<20-1))
}

func (w *writer) request(number int, r *request) Request {
	t := Request{Number: number, Disk: -1, Op: opNames[min(int(r.op), len(opNames)-1)], Offset: r.offset, Bytes: r.bytes, BeginNs: r.begin, Layers: map[string]uint64{},
		Mapped: []FileRange{}, Files: []FileRange{}, Sectors: []Sector{}, Offsets: unknown, Extents: unknown, Missing: r.missing(), Ends: endsInQemu}
	if n, is := w.disks[r.disk]; is && !r.isBare {
		t.Disk = n
	}
	if r.end != 0 {
		t.Ns = r.end - r.begin
		w.divide(&t, r)
	}
	for _, p := range r.pieces {
		if t.Ends == endsInQemu {
			t.Ends = endsInCache
		}
		i := fileOf(p, w.tail.Files)
		if hasOffset(p.op) && i >= 0 {
			t.Files = append(t.Files, FileRange{w.tail.Files[i].Path, p.offset, p.bytes})
		}
		for _, b := range p.bios {
			t.Ends = endsInDevice
			sector := Sector{Disk: w.name(b.device), Sector: b.sector, Bytes: b.bytes, Held: b.isForeign}
			if i >= 0 && b.inode != 0 {
				sector.File, sector.Offset = w.tail.Files[i].Path, b.fileOffset
			}
			t.Sectors = append(t.Sectors, sector)
		}
		if i >= 0 && len(p.bios) == 0 && hasOffset(p.op) && w.tail.Files[i].Direct {
			if isRead := p.op == uint8(vdiskVdiskOpVDISK_READ); isRead && w.tail.Files[i].isHole(p.offset, p.bytes) {
				if t.Ends == endsInCache {
					t.Ends = endsInHole
				}
			} else if t.Missing == "" {
				t.Missing = "no IO of a disk was seen for it, though it goes past the page cache"
			}
		}
	}
	w.checkOffsets(&t, r)
	w.checkExtents(&t, r)
	return t
}

// divide sets the time of the request in each layer and, for layers with probes, in each part.
func (w *writer) divide(t *Request, r *request) {
	for l := range layerCount {
		t.Layers[l.String()] = 0
	}
	var stretches []stretch
	for _, s := range r.stretches() {
		t.Layers[s.in.String()] += s.to - s.from
		stretches = append(stretches, stretch{s.from, s.to, s.in.String()})
	}
	t.Parts = divide(stretches, r.passes, w.probes)
}

// checkOffsets compares the places that qemu used with the places of `qemu-img map`.
func (w *writer) checkOffsets(t *Request, r *request) {
	i, is := w.images[r.disk]
	if !is || r.isBare || r.op == uint8(vdiskVdiskOpVDISK_FLUSH) {
		return
	}
	f := w.tail.Files[i]
	if f.Format == "raw" {
		t.Mapped = []FileRange{{f.Path, r.offset, r.bytes}}
	} else {
		t.Mapped, is = mapped(f, r.offset, r.bytes)
		if !is {
			return
		}
	}
	if len(t.Files) == 0 && len(t.Mapped) > 0 {
		return
	}
	t.Offsets = same
	for _, want := range t.Mapped {
		if !slices.ContainsFunc(t.Files, func(got FileRange) bool {
			return got.File == want.File && got.Offset <= want.Offset && want.Offset+want.Bytes <= got.Offset+got.Bytes
		}) {
			if t.Offsets = other; w.isMoved(t, r, f.Chain, want) {
				t.Offsets = moved
				continue
			}
			return
		}
	}
}

// isMoved reports whether the request went to files below the one where it is mapped, and all of that place was written
// later and nothing of it before: the write made a copy, as qcow2 does by the cluster.
func (w *writer) isMoved(t *Request, r *request, chain []string, want FileRange) bool {
	if slices.ContainsFunc(t.Files, func(got FileRange) bool { return slices.Index(chain, got.File) <= slices.Index(chain, want.File) }) {
		return false
	}
	var later []*piece
	end := want.Offset + want.Bytes
	for at := want.Offset / spotBytes; at <= (end-1)/spotBytes; at++ {
		for _, p := range w.writes[spot{want.File, at}] {
			switch {
			case p.offset >= end || p.offset+p.bytes <= want.Offset:
			case p.hand < r.begin:
				return false
			default:
				later = append(later, p)
			}
		}
	}
	slices.SortFunc(later, func(a, b *piece) int { return cmp.Compare(a.offset, b.offset) })
	written := want.Offset
	for _, p := range later {
		if p.offset <= written {
			written = max(written, p.offset+p.bytes)
		}
	}
	return written >= end
}

// mapped returns the ranges of the files that have a part of a virtual disk; false: some of it is not known.
func mapped(f File, offset, bytes uint64) (ranges []FileRange, complete bool) {
	ranges = []FileRange{}
	for bytes > 0 {
		s := find(f.Map, offset)
		if s == nil || s.Compressed || s.Depth < 0 || s.Offset != nil && s.Depth >= len(f.Chain) {
			return ranges, false
		}
		n := min(bytes, s.Start+s.Length-offset)
		if s.Data && s.Offset != nil {
			p := FileRange{f.Chain[s.Depth], *s.Offset + offset - s.Start, n}
			if last := len(ranges) - 1; last >= 0 && ranges[last].File == p.File && ranges[last].Offset+ranges[last].Bytes == p.Offset {
				ranges[last].Bytes += n
			} else {
				ranges = append(ranges, p)
			}
		}
		offset, bytes = offset+n, bytes-n
	}
	return ranges, true
}

// checkExtents compares the places that the kernel used with the file system's.
func (w *writer) checkExtents(t *Request, r *request) {
	for _, p := range r.pieces {
		i := fileOf(p, w.tail.Files)
		for _, b := range p.bios {
			if i < 0 || b.inode == 0 || b.parent != nil {
				continue
			}
			start := uint64(0)
			for _, d := range w.tail.Disks {
				if d.Device == w.tail.Files[i].Device {
					start = d.Start
				}
			}
			sector, is := w.tail.Files[i].sector(b.fileOffset, start)
			switch {
			case is && sector != b.sector:
				t.Extents = other
			case is && t.Extents == unknown:
				t.Extents = same
			}
		}
	}
}

func (r *Report) sum() {
	s := &r.Sum
	var totals []uint64
	layers := map[string][]uint64{}
	longest := map[string]uint64{}
	for _, t := range r.Requests {
		s.Requests++
		s.Ops[t.Op]++
		s.Ends[t.Ends]++
		if t.Missing == "" {
			s.Joined++
		} else {
			s.Missing[t.Missing]++
		}
		if len(t.Files) > 0 && t.Disk >= 0 {
			s.Offsets[t.Offsets]++
		}
		if len(t.Sectors) > 0 {
			s.Extents[t.Extents]++
		}
		if t.Ns == 0 {
			continue
		}
		totals = append(totals, t.Ns)
		most, in := uint64(0), ""
		for l := range layerCount {
			name := l.String()
			layers[name] = append(layers[name], t.Layers[name])
			if t.Layers[name] > most {
				most, in = t.Layers[name], name
			}
		}
		longest[in]++
	}
	var parts []Parts
	for _, t := range r.Requests {
		parts = append(parts, t.Parts)
	}
	s.Parts = sumParts(hostLayers(), r.Recording.Head.Probes, parts)
	all := add(totals)
	s.Total = spread(totals, all)
	for name, times := range layers {
		one := spread(times, all)
		one.Longest = longest[name]
		s.Layers[name] = one
	}
}

func add(times []uint64) (sum uint64) {
	for _, t := range times {
		sum += t
	}
	return sum
}

func spread(times []uint64, all uint64) Spread {
	if len(times) == 0 {
		return Spread{}
	}
	slices.Sort(times)
	at := func(q float64) uint64 { return times[max(0, int(math.Ceil(q*float64(len(times))))-1)] }
	sum := add(times)
	return Spread{Share: 100 * float64(sum) / float64(max(1, all)), Mean: sum / uint64(len(times)), P50: at(0.5), P90: at(0.9), P99: at(0.99), Max: times[len(times)-1]}
}

// Slowest returns the n requests that took longest; those without an end are left out.
func (r *Report) Slowest(n int) []Request {
	all := slices.Clone(r.Requests)
	slices.SortStableFunc(all, func(a, b Request) int { return cmp.Compare(b.Ns, a.Ns) })
	all = slices.DeleteFunc(all, func(t Request) bool { return t.Ns == 0 })
	return all[:min(n, len(all))]
}

// Slow returns the layer in which requests were longest; "": there are none.
func (s Sum) Slow() string { return slow(s.Layers) }

func slow(layers map[string]Spread) (name string) {
	most := 0.0
	for _, layer := range slices.Sorted(maps.Keys(layers)) {
		if layers[layer].Share > most {
			most, name = layers[layer].Share, layer
		}
	}
	return name
}
