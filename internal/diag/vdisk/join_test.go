package vdisk

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/test/golden"
)

// insideWrite is a write of a guest's thread: 20 ns in the file system, 10 in the queue, then in the driver, and 15 on the
// way back to the program. The device is 253:0, as 254 << 20 would be of another disk.
func insideWrite(s *story, issued, completed, offset, bytes uint64) {
	const device = 253 << 20
	id := offset + bytes
	s.at(issued-10, 9, vdiskVdiskKindVDISK_BIO, vdiskVdiskEvent{Id: id, Offset: offset / 512, Bytes: bytes, Op: write, Device: device, Inode: 12, FileDevice: device, Position: offset + 1<<20, Other: issued - 30})
	s.at(issued, 9, vdiskVdiskKindVDISK_ISSUE, vdiskVdiskEvent{Id: id << 8, Offset: offset / 512, Bytes: bytes, Op: write, Device: device})
	s.at(completed, 0, vdiskVdiskKindVDISK_COMPLETE, vdiskVdiskEvent{Id: id << 8, Offset: offset / 512, Bytes: bytes, Op: write, Device: device})
	s.at(completed+15, 9, vdiskVdiskKindVDISK_RETURN, vdiskVdiskEvent{Id: 18, Other: issued - 30, Bytes: 1, Result: int32(bytes)})
}

func insideTail() *Tail {
	const device = 253 << 20
	return &Tail{Seconds: 2, Ended: "it was stopped", NotRun: map[string]uint64{}, Notes: []string{},
		Files: []File{{Path: "/data/table", Device: device, Inode: 12, Descriptors: []int{}, Extents: []Extent{{Logical: 1 << 20, Length: 1 << 40}}}},
		Disks: []Disk{{Device: device, Whole: device, Name: "vda"}}, Tasks: map[uint32]Task{9: {PID: 8, Comm: "database"}}}
}

// halves are a host's and a guest's recording of so many writes. The guest's time is the host's minus ahead, and minus
// the effect of drift; each way of virtio takes a random time of at least 30 ns.
func halves(random *rand.Rand, writes int, ahead uint64, drift float64) (host, guest *Recording) {
	h, g := &story{}, &story{}
	inside := func(ns uint64) uint64 { return uint64(float64(ns-ahead) - drift*float64(int64(ns-ahead)-1_000_000)) }
	for i, slot := range random.Perm(writes) {
		at, offset := ahead+1_000_000+uint64(i)*50_000_000, uint64(slot)*16384
		oneWrite(h, at, 0xa0, offset, 1<<41)
		insideWrite(g, inside(at-30-random.Uint64N(2000)), inside(at+600+30+random.Uint64N(2000)), offset, 8192)
	}
	return &Recording{Head: Head{Kind: KindHost, Comm: "qemu"}, Events: h.events, Tail: aTail()},
		&Recording{Head: Head{Kind: KindGuest, Comm: "guest"}, Events: g.events, Tail: insideTail()}
}

// TestJoin joins all requests for any clocks, and bounds its error about them.
func TestJoin(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for _, drift := range []float64{0, 80e-6, -300e-6} {
		const ahead = 77_000_000_000
		host, guest := halves(random, 30, ahead, drift)
		b, err := Join(guest, host)
		if err != nil {
			t.Fatalf("drift %v: %v", drift, err)
		}
		if b.Sum.Requests != 30 || b.Sum.Joined != 30 || len(b.Sum.Alone) != 0 || b.Sum.Extents[same] != 30 || b.Disks["vda"] != 0 {
			t.Errorf("drift %v: %+v", drift, b.Sum)
		}
		if wrong := math.Abs(b.Clock.offset(1_000_000) - ahead); drift == 0 && wrong > b.Clock.Error || (drift != 0) != (b.Clock.Drift != 0) || math.Abs(b.Clock.Drift-drift) > 10e-6 {
			t.Errorf("drift %v: the offset is wrong by %v ns: %+v", drift, wrong, b.Clock)
		}
		for _, r := range b.Requests {
			checkInsideSum(t, r)
			if r.Host.Offset != r.Offset || r.Files[0].Offset != r.Offset+1<<20 || r.Layers[insideFiles] != 20 || r.Layers[insideQueue] != 10 || r.Layers[insideReturn] != 15 || r.Layers["device"] != 300 {
				t.Fatalf("drift %v: %+v: %+v", drift, r, r.Host)
			}
		}
	}
}

// TestJoinOfHalf takes events away at random, and repeats addresses: a request is joined with one of its address, or has
// a reason.
func TestJoinOfHalf(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	refused := 0
	for range 500 {
		host, guest := halves(random, 12, 5_000_000_000, 0)
		drop := func(Event) bool { return random.IntN(20) == 0 }
		host.Events, guest.Events = slices.DeleteFunc(host.Events, drop), slices.DeleteFunc(guest.Events, drop)
		b, err := Join(host, guest)
		if err != nil {
			refused++
			continue
		}
		reasons := uint64(0)
		for _, n := range b.Sum.Missing {
			reasons += n
		}
		if b.Sum.Joined+reasons != b.Sum.Requests || b.Sum.Missing[""] != 0 {
			t.Fatalf("%+v", b.Sum)
		}
		for _, r := range b.Requests {
			checkInsideSum(t, r)
			if (r.Host == nil) != (r.Missing != "") || r.Host != nil && r.Host.Offset != r.Offset {
				t.Fatalf("%+v", r)
			}
		}
	}
	if refused > 50 {
		t.Errorf("%d recordings of 500 are refused", refused)
	}
}

// TestJoinIsCertain refuses to join a request that could belong to more than one, and gives the reason why a request
// has no other half.
func TestJoinIsCertain(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 0))
	const ahead = 5_000_000_000
	why := func(change func(host, guest *story)) (*Both, map[string]uint64, map[string]uint64) {
		t.Helper()
		host, guest := halves(random, 8, ahead, 0)
		h, g := &story{events: host.Events}, &story{events: guest.Events}
		change(h, g)
		host.Events, guest.Events = h.events, g.events
		b, err := Join(host, guest)
		if err != nil {
			t.Fatal(err)
		}
		return b, b.Sum.Missing, b.Sum.Alone
	}
	at := uint64(1_000_000 + 3*50_000_000 + 10_000_000)
	_, missing, _ := why(func(h, g *story) { // twice at a time
		oneWrite(h, ahead+at, 0xa1, 1<<30, 1<<42)
		oneWrite(h, ahead+at+5, 0xa2, 1<<30, 1<<43)
		insideWrite(g, at-5000, at+5000, 1<<30, 8192)
	})
	if missing[manyInTime] != 1 {
		t.Errorf("two of the host: %v", missing)
	}
	_, missing, _ = why(func(h, g *story) {
		oneWrite(h, ahead+at, 0xa1, 1<<30, 1<<42)
		insideWrite(g, at-5000, at+5000, 1<<30, 8192)
		insideWrite(g, at-4000, at+4000, 1<<30, 4096)
	})
	if missing[manyInTime] != 2 {
		t.Errorf("two of the guest: %v", missing)
	}
	_, missing, _ = why(func(h, g *story) { // the host ends after the guest
		oneWrite(h, ahead+at, 0xa1, 1<<30, 1<<42)
		insideWrite(g, at-50_000, at-20_000, 1<<30, 4096)
		insideWrite(g, at-10_000, at+300, 1<<30, 4096)
	})
	if missing[noneInTime] != 2 {
		t.Errorf("it ends after the guest's: %v", missing)
	}
	_, missing, _ = why(func(h, g *story) { // a journal writes its first block again and again
		for i := range uint64(10) {
			oneWrite(h, ahead+at+i*20_000, 0xa1, 1<<30, 1<<42)
			insideWrite(g, at+i*20_000-50, at+i*20_000+700, 1<<30, 8192)
		}
	})
	if len(missing) != 0 {
		t.Errorf("again and again: %v", missing)
	}
	b, missing, _ := why(func(h, g *story) { // qemu makes one of two
		oneWrite(h, ahead+at, 0xa1, 1<<30, 1<<42)
		insideWrite(g, at-5000, at+5000, 1<<30, 4096)
		insideWrite(g, at-4000, at+4000, 1<<30+4096, 4096)
	})
	if len(missing) != 0 || !b.Requests[4].Shared || b.Requests[4].Host.Bytes != 8192 {
		t.Errorf("one of two: %v", missing)
	}
	_, missing, alone := why(func(h, g *story) {
		oneWrite(h, ahead+at, 0xa1, 1<<30, 1<<42)      // the guest did not ask
		insideWrite(g, at-5000, at+5000, 2<<30, 8192)  // the host did not see
		insideWrite(g, 1000, 2000, 3<<30, 8192)        // before the host's
		insideWrite(g, at+10e9, at+10e9+5000, 0, 8192) // after it
		g.at(at, 0, vdiskVdiskKindVDISK_ISSUE, vdiskVdiskEvent{Id: 1, Offset: 8, Bytes: 512, Op: write, Device: 7 << 20})
		g.at(at+1, 0, vdiskVdiskKindVDISK_COMPLETE, vdiskVdiskEvent{Id: 1, Offset: 8, Bytes: 512, Op: write, Device: 7 << 20})
		g.at(at, 0, vdiskVdiskKindVDISK_ISSUE, vdiskVdiskEvent{Id: 2, Offset: 8, Bytes: 512, Op: uint8(vdiskVdiskOpVDISK_OTHER), Device: 253 << 20})
		g.at(at+1, 0, vdiskVdiskKindVDISK_COMPLETE, vdiskVdiskEvent{Id: 2, Offset: 8, Bytes: 512, Op: uint8(vdiskVdiskOpVDISK_OTHER), Device: 253 << 20})
		g.at(at, 0, vdiskVdiskKindVDISK_ISSUE, vdiskVdiskEvent{Id: 3, Offset: 8, Bytes: 512, Op: write, Device: 253 << 20})
	})
	for _, reason := range []string{noneInTime, beforeHost, afterHost, otherDisk, otherKind, insideUnended} {
		if missing[reason] != 1 {
			t.Errorf("%s: %v", reason, missing)
		}
	}
	if alone[noneOfGuest] != 1 || len(alone) != 1 {
		t.Errorf("of the host alone: %v", alone)
	}
}

// TestTimeOfACall: a system call's time before its first IO is charged to that IO, and the time after it only if there
// is no other IO and no work of other tasks to wait for.
func TestTimeOfACall(t *testing.T) {
	const device, begin = 253 << 20, 1000
	call := func(number uint64, queued ...uint64) (told []InsideRequest) {
		s := &story{}
		for i, at := range queued {
			n := uint64(i)
			s.at(at, 9, vdiskVdiskKindVDISK_BIO, vdiskVdiskEvent{Id: n + 1, Offset: n * 64, Bytes: 512, Op: write, Device: device, Other: begin})
			s.at(at+10, 9, vdiskVdiskKindVDISK_ISSUE, vdiskVdiskEvent{Id: n + 90, Offset: n * 64, Bytes: 512, Op: write, Device: device})
			s.at(at+50, 0, vdiskVdiskKindVDISK_COMPLETE, vdiskVdiskEvent{Id: n + 90, Offset: n * 64, Bytes: 512, Op: write, Device: device})
		}
		s.at(5000, 9, vdiskVdiskKindVDISK_RETURN, vdiskVdiskEvent{Id: number, Other: begin, Bytes: uint64(len(queued))})
		_, told = insideRequests(&Recording{Events: s.events, Tail: insideTail()})
		return told
	}
	const pwrite, fsync = 18, 74
	if r := call(pwrite, 1100)[0]; r.Layers[insideFiles] != 100 || r.Layers[insideReturn] != 5000-1150 || r.Ns != 4000 {
		t.Errorf("one: %+v", r)
	}
	if r := call(fsync, 1100)[0]; r.Layers[insideFiles] != 100 || r.Layers[insideReturn] != 0 || r.Ns != 150 {
		t.Errorf("fsync: %+v", r)
	}
	two := call(pwrite, 1100, 1200)
	if two[0].Layers[insideFiles] != 100 || two[0].Layers[insideReturn] != 0 || two[1].Layers[insideFiles] != 0 || two[1].Layers[insideReturn] != 0 || two[1].Ns != 50 {
		t.Errorf("two: %+v", two)
	}
}

// TestJoinIsRefused where the clocks cannot be compared, with the reason.
func TestJoinIsRefused(t *testing.T) {
	random := rand.New(rand.NewPCG(2, 0))
	host, guest := halves(random, 8, 5_000_000_000, 0)
	_, stranger := halves(random, 8, 5_000_000_000, 0)
	for i := range stranger.Events {
		stranger.Events[i].Offset += 1 << 40
	}
	// The guest's clock jumps by less than the clocks might have drifted, and by more than its requests leave open.
	_, jumped := host, &Recording{Head: guest.Head, Events: slices.Clone(guest.Events), Tail: guest.Tail}
	for i := range jumped.Events {
		if i >= len(jumped.Events)/4 && i < len(jumped.Events)/2 {
			jumped.Events[i].TimeNs += 100_000
		}
	}
	// Always the same address: each shift of the clock is as good as another.
	again, repeated := &Recording{Head: host.Head, Tail: host.Tail}, &Recording{Head: guest.Head, Tail: guest.Tail}
	h, g := &story{}, &story{}
	for i := range uint64(4) {
		oneWrite(h, 5_000_000_000+i*50_000_000, 0xa0, 0, 1<<41)
	}
	for i := range uint64(2) {
		insideWrite(g, 1_000_000_000+i*50_000_000, 1_000_000_000+i*50_000_000+700, 0, 8192)
	}
	again.Events, repeated.Events = h.events, g.events
	for _, test := range []struct {
		a, b *Recording
		want string
	}{
		{host, host, "one must be of the host"},
		{guest, guest, "one must be of the host"},
		{host, stranger, "no request in common"},
		{host, jumped, "contradict each other"},
		{again, repeated, "the difference of the two clocks is uncertain"},
		{&Recording{}, guest, "no request in common"},
	} {
		if _, err := Join(test.a, test.b); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v, want %q", err, test.want)
		}
	}
}

// TestMapperInTheGuest has a device mapper hold back two bios of one call, each for a time of its own: the time is in the
// guest's queue, of both.
func TestMapperInTheGuest(t *testing.T) {
	const disk, mapper = 253 << 20, 252 << 20
	s := &story{}
	for i := range uint64(2) {
		s.at(1000+i, 9, vdiskVdiskKindVDISK_BIO, vdiskVdiskEvent{Id: 0x10 + i, Offset: i * 64, Bytes: 8192, Op: write, Device: mapper, Inode: 12, FileDevice: mapper, Position: i * 32768, Other: 900})
	}
	for i := range uint64(2) {
		at := 5000 + i*1000
		s.at(at, 7, vdiskVdiskKindVDISK_REMAP, vdiskVdiskEvent{Id: 0x20 + i, Offset: i * 64, Bytes: 8192, Op: write, Other: mapper})
		s.at(at, 7, vdiskVdiskKindVDISK_BIO, vdiskVdiskEvent{Id: 0x20 + i, Offset: 2048 + i*64, Bytes: 8192, Op: write, Device: disk})
		s.at(at+10, 7, vdiskVdiskKindVDISK_ISSUE, vdiskVdiskEvent{Id: 0x30 + i, Offset: 2048 + i*64, Bytes: 8192, Op: write, Device: disk})
		s.at(at+50, 0, vdiskVdiskKindVDISK_COMPLETE, vdiskVdiskEvent{Id: 0x30 + i, Offset: 2048 + i*64, Bytes: 8192, Op: write, Device: disk})
	}
	tail := insideTail()
	tail.Files[0].Device, tail.Files[0].Extents = mapper, []Extent{{Length: 8192}, {Logical: 32768, Physical: 32768, Length: 8192}}
	g := OfGuest(&Recording{Head: Head{Kind: KindGuest}, Events: s.events, Tail: tail})
	if g.Sum.Requests != 2 || slow(g.Sum.Layers) != insideQueue {
		t.Fatalf("%+v", g.Sum)
	}
	for i, want := range []uint64{4010, 5009} {
		r := g.Requests[i]
		checkInsideSum(t, r)
		if r.Layers[insideQueue] != want || r.Layers[insideBelow] != 40 || r.Extents != same || r.Comm != "database" || len(r.Files) != 1 || r.Files[0] != (FileRange{"/data/table", uint64(i) * 32768, 8192}) {
			t.Errorf("want %d ns in the queue: %+v", want, r)
		}
	}
}

// TestTimeOfACallOverAMapper: the bios that a device mapper makes of a call's IO, in the call, are not more IO of the
// call. If the IO becomes two requests, neither is charged with the time after both.
func TestTimeOfACallOverAMapper(t *testing.T) {
	const disk, mapper, begin, pwrite = 253 << 20, 252 << 20, 1000, 18
	call := func(parts uint64) (told []InsideRequest) {
		s := &story{}
		const sectors = 16
		s.at(1100, 9, vdiskVdiskKindVDISK_BIO, vdiskVdiskEvent{Id: 1, Bytes: sectors * 512, Op: write, Device: mapper, Other: begin})
		for i := range parts {
			at, from, bytes := 1110+i*100, i*sectors/parts, sectors*512/parts
			s.at(at, 9, vdiskVdiskKindVDISK_REMAP, vdiskVdiskEvent{Id: 2 + i, Offset: from, Bytes: bytes, Op: write, Other: mapper})
			s.at(at, 9, vdiskVdiskKindVDISK_BIO, vdiskVdiskEvent{Id: 2 + i, Offset: 2048 + i*4096, Bytes: bytes, Op: write, Device: disk, Other: begin})
			s.at(at+5, 9, vdiskVdiskKindVDISK_POINT, vdiskVdiskEvent{Other: begin})
			s.at(at+10, 9, vdiskVdiskKindVDISK_ISSUE, vdiskVdiskEvent{Id: 90 + i, Offset: 2048 + i*4096, Bytes: bytes, Op: write, Device: disk})
			s.at(at+50, 0, vdiskVdiskKindVDISK_COMPLETE, vdiskVdiskEvent{Id: 90 + i, Offset: 2048 + i*4096, Bytes: bytes, Op: write, Device: disk})
		}
		s.at(5000, 9, vdiskVdiskKindVDISK_RETURN, vdiskVdiskEvent{Id: pwrite, Other: begin, Bytes: 1 + parts})
		_, told = insideRequests(&Recording{Head: Head{Probes: []string{"p"}}, Events: s.events, Tail: insideTail()})
		return told
	}
	one := call(1)
	if len(one) != 1 || one[0].Layers[insideFiles] != 100 || one[0].Layers[insideReturn] != 5000-1160 || one[0].Ns != 4000 || one[0].Parts[insideQueue]["p"] != 5 {
		t.Errorf("one: %+v", one)
	}
	if two := call(2); len(two) != 2 || two[0].Layers[insideReturn] != 0 || two[1].Layers[insideReturn] != 0 {
		t.Errorf("two: %+v", two)
	}
}

func TestOutputOfBoth(t *testing.T) {
	host, guest := halves(rand.New(rand.NewPCG(3, 0)), 3, 5_000_000_000, 0)
	guest.Events = guest.Events[:len(guest.Events)-2] // the last one does not end
	b, err := Join(host, guest)
	if err != nil {
		t.Fatal(err)
	}
	var people, programs, plot, alone, aloneJSON, chain bytes.Buffer
	g := OfGuest(guest)
	for _, err := range []error{b.Print(&people, 10), b.PrintJSON(&programs), b.Plot(&plot, 10), g.Print(&alone, -1), g.PrintJSON(&aloneJSON), g.Plot(&bytes.Buffer{}, 1), b.Chain(&chain, 10), g.Chain(&chain, -1), b.Host.Chain(&chain, -1)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	golden.Require(t, "testdata/host.rec", string(encode(t, host)))
	golden.Require(t, "testdata/guest.rec", string(encode(t, guest)))
	golden.Require(t, "testdata/both.txt", people.String())
	golden.Require(t, "testdata/chains.txt", chain.String())
	golden.Require(t, "testdata/both.json", programs.String())
	golden.Require(t, "testdata/both.svg", plot.String())
	golden.Require(t, "testdata/guest.txt", alone.String())
	golden.Require(t, "testdata/guest.json", aloneJSON.String())
}
