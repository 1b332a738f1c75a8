package vdisk

import "slices"

// Layer is a layer in which a request can be, in the order of its path down; the last one is its path up.
type Layer int

// A request is in the deepest layer that any part of it is in, so the layers' times add up to the request's.
const (
	InQemu   Layer = iota // device model and block layer: from the guest's request on
	HandOver              // waits for a thread of qemu, or for a batch to be full
	InSystem              // system call and file system
	Limited               // held back by a cgroup's limit (io.max)
	InQueue               // in the block layer, until a driver is given it; of a flush until its end
	InDevice              // driver and device
	WayUp                 // from the end of the last part in the kernel until the device model has the answer
	layerCount
)

var layerNames = [layerCount]string{"qemu", "hand-over", "vfs", "limit", "queue", "device", "return"}

func (l Layer) String() string { return layerNames[l] }

// hostLayers returns the names of a host's layers, in their order.
func hostLayers() []string { return slices.Clone(layerNames[:]) }

// span is a time in a layer.
type span struct {
	from, to uint64
	in       Layer
}

// spans returns the times of the request's parts in their layers, which overlap.
func (r *request) spans() (all []span) {
	add := func(from, to uint64, in Layer) {
		from, to = max(from, r.begin), min(to, r.end)
		if from != 0 && from < to {
			all = append(all, span{from, to, in})
		}
	}
	for _, p := range r.pieces {
		enter := p.call
		if enter == 0 && len(p.bios) > 0 {
			enter = p.bios[0].queued
		}
		add(p.hand, enter, HandOver)
		add(enter, p.ret, InSystem)
		for _, b := range p.bios {
			if b.isForeign {
				add(enter, b.queued, Limited)
			}
			add(b.queued, b.ended, InQueue)
			for _, t := range b.transfers {
				add(t.issued, t.completed, InDevice)
			}
		}
	}
	return all
}

// stretches returns the times of the request, each in one layer, from its beginning to its end.
func (r *request) stretches() (stretches []span) {
	all := r.spans()
	bounds := []uint64{r.begin, r.end}
	last := uint64(0)
	for _, s := range all {
		bounds = append(bounds, s.from, s.to)
		last = max(last, s.to)
	}
	slices.Sort(bounds)
	bounds = slices.Compact(bounds)
	for i := 1; i < len(bounds); i++ {
		from, to := bounds[i-1], bounds[i]
		in := InQemu
		if last > 0 && from >= last {
			in = WayUp
		}
		for _, s := range all {
			if s.from <= from && s.to >= to && (in == WayUp || s.in > in) {
				in = s.in
			}
		}
		stretches = append(stretches, span{from, to, in})
	}
	return stretches
}

// endUnseen: Linux 6.18 leaves out a run of the program at block_rq_complete now and then, and does not count it as missed.
const endUnseen = "the end of its IO was not seen"

// endForgotten: twice, the map of followed requests returned an error.
const endForgotten = "the kernel did not let the recorder follow its IO to the end"

// missing returns the reason why the request is not joined down to the device; "": it is.
func (r *request) missing() string {
	switch {
	case r.end == 0:
		return "its end is not in the recording"
	case r.isBare:
	case r.blocks == 0 && len(r.pieces) == 0 && r.op != uint8(vdiskVdiskOpVDISK_FLUSH):
		return "qemu's block layer was not seen to work for it"
	}
	for _, p := range r.pieces {
		if p.how == vdiskVdiskHandVDISK_HAND_URING && p.op == uint8(vdiskVdiskOpVDISK_FLUSH) {
			continue // a task of the kernel does it: its time is qemu's
		}
		if p.call == 0 && len(p.bios) == 0 {
			return "no system call was seen for it"
		}
		for _, b := range p.bios {
			switch {
			case b.bytes == 0: // a flush
			case b.parent == nil && len(b.transfers) == 0 && !slices.ContainsFunc(p.bios, func(o *bio) bool { return o.parent == b }):
				return "no request to a driver was seen for it"
			case b.ended == 0 && slices.ContainsFunc(b.transfers, func(t *transfer) bool { return t.unfollowed != 0 }):
				return endForgotten
			case b.ended == 0:
				return endUnseen
			}
		}
	}
	return ""
}
