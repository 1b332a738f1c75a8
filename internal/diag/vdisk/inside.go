package vdisk

import (
	"cmp"
	"fmt"
	"slices"
)

// inside is a request to a driver of the guest: a request of the device model in qemu, or a part of one.
type inside struct {
	*transfer
	began uint64 // ns of the guest's CLOCK_BOOTTIME: of the system call if this is its first IO, otherwise when its IO was queued
	queue uint64 // when its IO entered the block layer
	tid   uint32
	held  bool   // a cgroup's limit held it back between the call and the queueing
	back  uint64 // when the system call ended, if it had no other IO and waited for this one; otherwise 0
	// passes are the passes of probes in its system call, until its first IO is queued; if that is its only IO, until
	// its end.
	passes []pass
}

// callKey is a system call of the guest.
type callKey struct {
	tid   uint32
	began uint64
}

// insideCalls are the known system calls, by call.
type insideCalls struct {
	firsts map[callKey]*bio
	alone  map[callKey]uint64 // with one bio: when the calls ended
	bios   map[callKey]int    // number of bios, without the bios that device mapper made of others
	made   map[callKey]int    // number of bios that device mapper made
	passes map[callKey][]pass
	parts  map[*bio]int // by bio of a call: the number of requests that it became
}

// joinInside turns a guest's events into its requests to drivers, in their order.
func joinInside(events []Event, disks []Disk) []*inside {
	j := newJoiner(disks)
	var all []*inside
	calls := insideCalls{map[callKey]*bio{}, map[callKey]uint64{}, map[callKey]int{}, map[callKey]int{}, map[callKey][]pass{}, map[*bio]int{}}
	events = ordered(events)
	for i := range events {
		e := &events[i]
		if e.Op == uint8(vdiskVdiskOpVDISK_FLUSH) && e.Bytes == 0 {
			e.Offset = 0 // it has no position, and the kernel reports -1
		}
		switch vdiskVdiskKind(e.Kind) {
		case vdiskVdiskKindVDISK_BIO:
			b := &bio{queued: e.TimeNs, device: e.Device, sector: e.Offset, bytes: e.Bytes, left: e.Bytes, tid: e.TID, called: e.Other,
				isForeign: e.IsForeign != 0, inode: e.Inode, fileDevice: e.FileDevice, generation: uint32(e.Result), fileOffset: e.Position}
			j.descend(e.Id, b)
			j.bios[e.Id] = b
			key := callKey{e.TID, e.Other}
			switch {
			case e.Other == 0:
			case b.parent != nil: // the parent has its time
				calls.made[key]++
			default:
				if calls.bios[key]++; calls.firsts[key] == nil {
					calls.firsts[key] = b
				}
			}
		case vdiskVdiskKindVDISK_POINT:
			key := callKey{e.TID, e.Other}
			calls.passes[key] = append(calls.passes[key], pass{e.TimeNs, e.Id})
		case vdiskVdiskKindVDISK_RETURN:
			key := callKey{e.TID, e.Other}
			if calls.bios[key] == 1 && e.Bytes == uint64(1+calls.made[key]) && !waitsForOthers(e.Id) { // the kernel counts all of them
				calls.alone[key] = e.TimeNs
			}
		case vdiskVdiskKindVDISK_ISSUE:
			if t := j.transfers[e.Id]; t != nil && t.sector == e.Offset && t.bytes == e.Bytes && t.op == e.Op && t.completed == 0 {
				t.issued = e.TimeNs // the driver had no room, and gets it again
				continue
			}
			j.belowFiles(e)
			t := j.transfers[e.Id]
			if t == nil || t.issued != e.TimeNs || len(t.bios) == 0 { // a flush, or its bio was not seen
				t = &transfer{op: e.Op, issued: e.TimeNs, device: e.Device, sector: e.Offset, bytes: e.Bytes}
				j.transfers[e.Id] = t
			}
			all = append(all, &inside{transfer: t})
		default:
			j.belowFiles(e)
		}
	}
	for _, r := range all {
		roots := map[*bio]bool{}
		for _, b := range r.bios {
			if b = b.root(); !roots[b] {
				roots[b] = true
				calls.parts[b]++
			}
		}
	}
	for _, r := range all {
		r.setTimes(calls)
	}
	return all
}

// waitsForOthers reports whether a system call also waits for IO of other tasks, such as a journal's. The numbers are x86-64's, of
// asm/unistd_64.h: msync, fsync, fdatasync, sync, sync_file_range, fallocate, syncfs.
func waitsForOthers(number uint64) bool {
	return slices.Contains([]uint64{26, 74, 75, 162, 277, 285, 306}, number)
}

// setTimes sets when the request's path began and ended. A call that makes several requests waits for all of them: the time
// before the first belongs to that one, and the time after the last to none.
func (r *inside) setTimes(calls insideCalls) {
	r.began, r.queue = r.issued, r.issued
	for _, b := range r.bios {
		b = b.root()
		if r.tid == 0 || b.queued < r.queue {
			r.tid = b.tid
		}
		r.queue = min(r.queue, b.queued)
	}
	r.began = r.queue
	for _, b := range r.bios {
		b = b.root()
		key := callKey{b.tid, b.called}
		if b.called == 0 || calls.firsts[key] != b || b.transfers != nil && b.transfers[0] != r.transfer {
			continue
		}
		r.began, r.queue, r.tid, r.held = min(r.began, b.called), min(r.queue, b.queued), b.tid, b.isForeign
		for _, p := range calls.passes[key] {
			if p.at < r.queue || calls.bios[key] == 1 {
				r.passes = append(r.passes, p)
			}
		}
		if back := calls.alone[key]; len(r.bios) == 1 && calls.parts[b] == 1 && r.completed != 0 && back > r.completed {
			r.back = back
		}
	}
	// Bios come in any order, and two parts of one that device mapper has divided have the same passes.
	slices.SortFunc(r.passes, func(a, b pass) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.probe, b.probe)) })
	r.passes = slices.Compact(r.passes)
}

// end returns when the request is over, in the guest's time; 0: not seen.
func (r *inside) end() uint64 { return max(r.completed, r.back) }

// Names of the layers of the guest. The layer below is the part that the guest does not see.
const (
	insideFiles  = "guest-fs"
	insideLimit  = "guest-limit"
	insideQueue  = "guest-queue"
	insideBelow  = "below"
	insideDown   = "virtio"
	insideUp     = "notify"
	insideReturn = "guest-return"
)

// insideLayers returns the layers of a guest's recording alone, in the order of a request's path.
func insideLayers() []string {
	return []string{insideFiles, insideLimit, insideQueue, insideBelow, insideReturn}
}

// allLayers returns the layers of both halves.
func allLayers() []string {
	all := append([]string{insideFiles, insideLimit, insideQueue, insideDown}, hostLayers()...)
	return append(all, insideUp, insideReturn)
}

// InsideRequest is a guest's request to a driver, with its path below if the host's recording has it.
type InsideRequest struct {
	Number  int               `json:"number"` // from 0, by their issue
	Disk    string            `json:"guest_disk"`
	Op      string            `json:"op"`     // read, write, flush or other
	Offset  uint64            `json:"offset"` // bytes, on the guest's disk: its block address
	Bytes   uint64            `json:"bytes"`
	PID     int               `json:"guest_pid"` // of the first task that queued it; 0: not known
	Comm    string            `json:"guest_comm"`
	BeginNs uint64            `json:"guest_begin_ns"` // CLOCK_BOOTTIME of the guest
	Ns      uint64            `json:"ns"`             // 0: its end was not seen
	Layers  map[string]uint64 `json:"layers_ns"`      // they add up to Ns
	Parts   Parts             `json:"parts_ns,omitempty"`
	// Files are the guest's, and Extents says whether they are at the places that the file system reports now: same, other, or
	// unknown.
	Files   []FileRange `json:"guest_files"`
	Extents string      `json:"guest_extents"`
	// Host is the request of the device model; nil: there is none, and Missing has the reason. Shared: qemu made one of
	// several.
	Host    *Request `json:"host"`
	Shared  bool     `json:"shared"`
	Missing string   `json:"missing"`
}

const insideUnended = "its end is not in the guest's recording"

// insideRequests returns the joined requests of a guest.
func insideRequests(rec *Recording) ([]*inside, []InsideRequest) {
	tail := Tail{}
	if rec.Tail != nil {
		tail = *rec.Tail
	}
	w := &writer{tail: tail}
	all := joinInside(rec.Events, tail.Disks)
	files := map[fileKey]int{}
	for i, f := range tail.Files {
		files[fileKey{f.Inode, f.Device, f.Generation}] = i
	}
	starts := map[uint32]uint64{}
	for _, d := range tail.Disks {
		starts[d.Device] = d.Start
	}
	told := []InsideRequest{}
	for i, r := range all {
		t := InsideRequest{Number: i, Disk: w.name(r.device), Op: opNames[min(int(r.op), len(opNames)-1)], Offset: r.sector * 512, Bytes: r.bytes, BeginNs: r.began,
			PID: tail.Tasks[r.tid].PID, Comm: tail.Tasks[r.tid].Comm, Layers: map[string]uint64{}, Files: []FileRange{}, Extents: unknown}
		if r.completed == 0 {
			t.Missing = insideUnended
		} else {
			t.Ns = r.end() - r.began
			above := insideFiles
			if r.held {
				above = insideLimit
			}
			stretches := []stretch{{r.began, r.queue, above}, {r.queue, r.issued, insideQueue}, {r.issued, r.completed, insideBelow}, {r.completed, r.end(), insideReturn}}
			for _, s := range stretches {
				t.Layers[s.in] = s.to - s.from
			}
			t.Parts = divide(stretches, r.passes, rec.Head.Probes)
		}
		for _, b := range r.bios {
			from, to := max(b.sector, r.sector), min(b.sector+b.bytes/512, r.sector+r.bytes/512)
			if b.fileDevice == 0 || from >= to {
				continue
			}
			offset := b.fileOffset + (from-b.sector)*512
			if b.inode == 0 {
				t.addFile(FileRange{"metadata of " + w.name(b.fileDevice), offset, (to - from) * 512})
				continue
			}
			f, is := files[fileKey{b.inode, b.fileDevice, b.generation}]
			if !is {
				t.addFile(FileRange{fmt.Sprintf("inode %d of %s", b.inode, w.name(b.fileDevice)), offset, (to - from) * 512})
				continue
			}
			t.addFile(FileRange{tail.Files[f].Path, offset, (to - from) * 512})
			// A file on device mapper has its extents there.
			at := b.onRoot(from)
			t.compare(tail.Files[f], offset, at, at+to-from, starts[b.fileDevice])
		}
		told = append(told, t)
	}
	return all, told
}

func partsOf(requests []InsideRequest) (all []Parts) {
	for _, t := range requests {
		all = append(all, t.Parts)
	}
	return all
}

// passesOf counts the passes of requests by the probe's number.
func passesOf(requests []*inside) map[uint64]uint64 {
	passes := map[uint64]uint64{}
	for _, r := range requests {
		for _, p := range r.passes {
			if p.at < r.end() {
				passes[p.probe]++
			}
		}
	}
	return passes
}

// addFile adds a range, or extends the last one if the range continues it.
func (t *InsideRequest) addFile(p FileRange) {
	if last := len(t.Files) - 1; last >= 0 && t.Files[last].File == p.File && t.Files[last].Offset+t.Files[last].Bytes == p.Offset {
		t.Files[last].Bytes += p.Bytes
		return
	}
	t.Files = append(t.Files, p)
}

// compare checks the first and the last sector of a part against the file's extents.
func (t *InsideRequest) compare(f File, offset, from, to, start uint64) {
	for _, n := range []uint64{0, to - from - 1} {
		sector, is := f.sector(offset+n*512, start)
		switch {
		case is && sector != from+n:
			t.Extents = other
		case is && t.Extents == unknown:
			t.Extents = same
		}
	}
}

// sumLayers returns the spreads of requests' times, in all and by layer.
func sumLayers(names []string, requests []InsideRequest) (total Spread, layers map[string]Spread) {
	var totals []uint64
	by, longest := map[string][]uint64{}, map[string]uint64{}
	for _, t := range requests {
		totals = append(totals, t.Ns)
		most, in := uint64(0), ""
		for _, name := range names {
			by[name] = append(by[name], t.Layers[name])
			if t.Layers[name] > most {
				most, in = t.Layers[name], name
			}
		}
		longest[in]++
	}
	all := add(slices.Clone(totals))
	total, layers = spread(totals, all), map[string]Spread{}
	for name, times := range by {
		one := spread(times, all)
		one.Longest = longest[name]
		layers[name] = one
	}
	return total, layers
}
