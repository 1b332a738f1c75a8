package vdisk

import (
	"cmp"
	"slices"
)

// request is a request of the device model; or, if its symbols are missing, a file's request in its place.
type request struct {
	disk          uint64 // qemu's address of the disk
	op            uint8
	offset, bytes uint64 // in the virtual disk
	begin, end    uint64 // ns of CLOCK_BOOTTIME; end 0: not seen
	caller        uint64
	tid           uint32
	blocks        int // number of requests to qemu's block layer
	pieces        []*piece
	passes        []pass // of probes, by their time
	isBare        bool   // no request of the device model: a file's
}

// piece is a request of a file: qemu's request to the kernel, on behalf of a request.
type piece struct {
	of            *request
	op            uint8
	how           vdiskVdiskHand
	offset, bytes uint64 // in the file
	descriptor    int
	hand          uint64 // when it was handed over
	call, ret     uint64 // the system call; 0: not seen
	isAsync       bool   // it continues after the call
	bios          []*bio
}

type bio struct {
	queued, ended uint64
	device        uint32
	sector, bytes uint64
	left          uint64
	isForeign     bool
	inode         uint64 // 0: not known
	fileDevice    uint32
	fileOffset    uint64
	transfers     []*transfer
	// Of a guest: the thread, when its system call began (0: in none), and the file's generation.
	tid        uint32
	called     uint64
	generation uint32
	// parent is the bio from which device mapper made this one, and above is its beginning there: a sector of the
	// parent's device.
	parent *bio
	above  uint64
}

// root returns the bio from which device mapper has made this one, over all steps: a file system made it.
func (b *bio) root() *bio {
	for b.parent != nil {
		b = b.parent
	}
	return b
}

// onRoot returns the position of a sector of the bio on the device of its root, which is the file system's.
func (b *bio) onRoot(sector uint64) uint64 {
	for ; b.parent != nil; b = b.parent {
		sector += b.above - b.sector
	}
	return sector
}

// transfer is a request to a driver.
type transfer struct {
	op                uint8
	issued, completed uint64
	device            uint32
	sector, bytes     uint64
	failed            int32
	unfollowed        int32 // the kernel's error because of which its end is not seen; 0: it is seen
	bios              []*bio
}

// coroutine is a stack of qemu, while it works for a request.
type coroutine struct {
	stack uint64
	of    *request
	block *Event // its last event of the block layer that was not handed over yet
	first bool   // the request's first one, which lives as long as the request
}

// birth is a coroutine that was made and that has not been seen on a stack.
type birth struct {
	of    *request
	stack uint64 // its maker's
	first bool
}

// ask identifies the bytes that a request asks for.
type ask struct {
	op            uint8
	offset, bytes uint64
}

func (r *request) ask() ask { return ask{r.op, r.offset, r.bytes} }

// call is a system call that has not returned.
type call struct {
	began  uint64
	number uint64
	pieces []*piece
}

// joined has the joined events.
type joined struct {
	requests []*request
	// Events that belong to no request: qemu's own IO, or IO that began before the recording.
	strayBlocks, strayCalls, strayBios, cutParts uint64
}

// stackReach is the largest distance of stack pointers of one coroutine. Stacks of qemu's coroutines have 1 MiB
// and a guard page (COROUTINE_STACK_SIZE of its include/qemu/coroutine_int.h).
const stackReach = 512 << 10

const write = uint8(vdiskVdiskOpVDISK_WRITE)

type joiner struct {
	joined
	wholes     map[uint32]uint32 // the disk of a partition
	begun      map[uint32]*request
	born       map[uint32]birth   // by thread: the last one
	held       map[ask][]*request // made before the last one, and not seen since: qemu may hold them back before its block layer
	roots      map[uint64]uint64  // by disk: the edge of the graph by which requests come in
	handles    map[uint64]*request
	coroutines []*coroutine        // by stack
	waiting    map[uint64][]*piece // by offset: handed over, and no call seen
	unnamed    []*piece            // handed over, and no call seen; flushes, or zeros to be written
	under      map[uint64][]*piece // by offset: in the kernel
	calls      map[uint32]*call
	bios       map[uint64]*bio
	owners     map[*bio]*piece
	transfers  map[uint64]*transfer
	direct     map[uint64]uint64 // by a file's request in the kernel: bytes of its bios so far
	remaps     map[uint64]Event
	isBare     bool
}

// join joins events, in any order. bare: without requests of the device model.
func join(events []Event, disks []Disk, bare bool) joined {
	j := newJoiner(disks)
	j.isBare = bare
	events = ordered(events)
	for i := range events {
		j.take(&events[i])
	}
	return j.joined
}

func newJoiner(disks []Disk) *joiner {
	j := &joiner{wholes: map[uint32]uint32{}, begun: map[uint32]*request{}, born: map[uint32]birth{}, held: map[ask][]*request{}, roots: map[uint64]uint64{}, handles: map[uint64]*request{},
		waiting: map[uint64][]*piece{}, under: map[uint64][]*piece{}, calls: map[uint32]*call{}, bios: map[uint64]*bio{}, owners: map[*bio]*piece{},
		transfers: map[uint64]*transfer{}, direct: map[uint64]uint64{}, remaps: map[uint64]Event{}}
	for _, d := range disks {
		j.wholes[d.Device] = d.Whole
	}
	return j
}

// ordered returns the events by time.
func ordered(events []Event) []Event {
	events = slices.Clone(events)
	slices.SortStableFunc(events, func(a, b Event) int { return cmp.Compare(a.TimeNs, b.TimeNs) })
	return events
}

func (j *joiner) take(e *Event) {
	switch vdiskVdiskKind(e.Kind) {
	case vdiskVdiskKindVDISK_BEGIN:
		r := &request{disk: e.Id, op: e.Op, offset: e.Offset, bytes: e.Bytes, begin: e.TimeNs, caller: e.Other, tid: e.TID}
		j.requests = append(j.requests, r)
		j.begun[e.TID] = r
	case vdiskVdiskKindVDISK_COROUTINE:
		j.coroutine(e)
	case vdiskVdiskKindVDISK_BLOCK:
		j.block(e)
	case vdiskVdiskKindVDISK_HAND:
		j.hand(e)
	case vdiskVdiskKindVDISK_FINISH:
		if r := j.handles[e.Id]; r != nil {
			r.end = e.TimeNs
			delete(j.handles, e.Id)
			for _, p := range r.pieces { // pieces in holes have no bios that end
				j.leave(p)
			}
		}
	case vdiskVdiskKindVDISK_CALL:
		j.called(e)
	case vdiskVdiskKindVDISK_PART:
		if c := j.calls[e.TID]; c != nil {
			j.claim(e, c, true)
		}
	case vdiskVdiskKindVDISK_CUT:
		j.cutParts += e.Id
	case vdiskVdiskKindVDISK_RETURN:
		j.returned(e)
	case vdiskVdiskKindVDISK_BIO:
		j.queued(e)
	case vdiskVdiskKindVDISK_POINT:
		j.passed(e)
	default:
		j.belowFiles(e)
	}
}

// passed finds the request at a probe: in the kernel the request of the thread's system call, if the call is for only
// one; in qemu the request of the coroutine, or the one that is about to get its coroutine.
func (j *joiner) passed(e *Event) {
	var of *request
	if e.Stack == 0 {
		if c := j.calls[e.TID]; c != nil && len(c.pieces) == 1 {
			of = c.pieces[0].of
		}
	} else if c := j.on(e.Stack); c.isLive() {
		of = c.of
	} else if b, is := j.born[e.TID]; is && distance(b.stack, e.Stack) >= stackReach {
		of = b.of
	} else {
		of = j.begun[e.TID]
	}
	if of != nil && of.end == 0 {
		of.passes = append(of.passes, pass{e.TimeNs, e.Id})
	}
}

// belowFiles takes events of the block layer, except bios.
func (j *joiner) belowFiles(e *Event) {
	switch vdiskVdiskKind(e.Kind) {
	case vdiskVdiskKindVDISK_SPLIT:
		for _, b := range j.bios {
			if b.covers(e.Offset, e.Bytes) {
				j.bios[e.Id] = b
				break
			}
		}
	case vdiskVdiskKindVDISK_REMAP:
		// A partition's remap leads to no other bio, and comes after one of device mapper.
		if j.whole(uint32(e.Other)) == uint32(e.Other) {
			j.remaps[e.Id] = *e
		}
	case vdiskVdiskKindVDISK_ISSUE:
		j.issued(e)
	case vdiskVdiskKindVDISK_COMPLETE:
		j.completed(e)
	}
}

func distance(a, b uint64) uint64 { return max(a, b) - min(a, b) }

// coroutine takes the coroutine of the request that began last on the thread, or of the one whose coroutine makes it.
func (j *joiner) coroutine(e *Event) {
	if b := j.born[e.TID]; b.first && hasOffset(b.of.op) {
		j.held[b.of.ask()] = append(j.held[b.of.ask()], b.of)
	}
	if r := j.begun[e.TID]; r != nil {
		delete(j.begun, e.TID)
		j.handles[e.Id] = r
		j.born[e.TID] = birth{r, e.Stack, true}
		return
	}
	if c := j.on(e.Stack); c != nil && c.of != nil {
		j.born[e.TID] = birth{c.of, e.Stack, false}
	} else {
		delete(j.born, e.TID)
	}
}

// on returns the coroutine with a stack.
func (j *joiner) on(stack uint64) *coroutine {
	i, _ := slices.BinarySearchFunc(j.coroutines, stack, func(c *coroutine, s uint64) int { return cmp.Compare(c.stack, s) })
	for _, n := range []int{i - 1, i} {
		if n >= 0 && n < len(j.coroutines) && distance(j.coroutines[n].stack, stack) < stackReach {
			return j.coroutines[n]
		}
	}
	return nil
}

// running returns the coroutine that the event is in; nil: it belongs to no request.
func (j *joiner) running(e *Event) *coroutine {
	c := j.on(e.Stack)
	if b, is := j.begins(e, c); is {
		// Its first event: stacks are reused, so the coroutine that was on it before is over.
		if c == nil {
			c = &coroutine{stack: e.Stack}
			i, _ := slices.BinarySearchFunc(j.coroutines, e.Stack, func(c *coroutine, s uint64) int { return cmp.Compare(c.stack, s) })
			j.coroutines = slices.Insert(j.coroutines, i, c)
		}
		c.of, c.block, c.first = b.of, nil, b.first
	}
	if !c.isLive() {
		return nil
	}
	return c
}

func (c *coroutine) isLive() bool { return c != nil && c.of != nil && c.of.end == 0 }

// begins finds the coroutine whose first event this is, given the coroutine that was on its stack before. The first
// coroutine of a read or write begins with the bytes that the request asks for; others begin where they were made, and
// not on the stack of a living one.
func (j *joiner) begins(e *Event, before *coroutine) (b birth, is bool) {
	isBlock := vdiskVdiskKind(e.Kind) == vdiskVdiskKindVDISK_BLOCK
	asked := ask{e.Op, e.Offset, e.Bytes}
	b, is = j.born[e.TID]
	is = is && distance(b.stack, e.Stack) >= stackReach
	switch {
	case is && b.first && hasOffset(b.of.op):
		is = isBlock && asked == b.of.ask()
	case is:
		is = !before.isLive() || !before.first
	}
	switch {
	case is:
		delete(j.born, e.TID)
	case isBlock && (!before.isLive() || !before.first):
		b.of = takeFirst(j.held, asked, func(r *request) bool { return r.end == 0 && (!before.isLive() || j.roots[r.disk] == e.Id) })
		b.first, is = true, b.of != nil
	}
	if is && b.first && isBlock && asked == b.of.ask() {
		j.roots[b.of.disk] = e.Id
	}
	return b, is
}

func (j *joiner) block(e *Event) {
	c := j.running(e)
	if c == nil {
		j.strayBlocks++
		return
	}
	c.of.blocks++
	c.block = e
}

func (j *joiner) hand(e *Event) {
	c := j.running(e)
	if c == nil {
		return
	}
	p := &piece{of: c.of, how: vdiskVdiskHand(e.Result), hand: e.TimeNs, op: uint8(vdiskVdiskOpVDISK_FLUSH), descriptor: -1}
	if c.block != nil {
		p.op, p.offset, p.bytes = c.block.Op, c.block.Offset, c.block.Bytes
		c.block = nil
	}
	c.of.pieces = append(c.of.pieces, p)
	switch {
	case p.op == uint8(vdiskVdiskOpVDISK_FLUSH):
		j.unnamed = append(j.unnamed, p)
	case p.how == vdiskVdiskHandVDISK_HAND_URING:
		p.isAsync = true
		j.enter(p)
	default:
		j.waiting[p.offset] = append(j.waiting[p.offset], p)
	}
}

func (j *joiner) enter(p *piece) { j.under[p.offset] = append(j.under[p.offset], p) }

func (j *joiner) called(e *Event) {
	c := &call{began: e.TimeNs, number: e.Id}
	j.calls[e.TID] = c
	if e.Id != numberIOSubmit && e.Id != numberIOUringEnter {
		j.claim(e, c, false)
	}
}

// x86-64's numbers of asm/unistd_64.h.
const (
	numberIOSubmit     = 209
	numberIOUringEnter = 426
)

// claim finds the piece that the call belongs to.
func (j *joiner) claim(e *Event, c *call, async bool) {
	p := j.findWaiting(e)
	if p == nil && j.isBare {
		r := &request{op: e.Op, offset: e.Offset, bytes: e.Bytes, begin: c.began, tid: e.TID, isBare: true}
		p = &piece{of: r, op: e.Op, offset: e.Offset, bytes: e.Bytes, hand: c.began}
		r.pieces = []*piece{p}
		j.requests = append(j.requests, r)
	}
	if p == nil {
		j.strayCalls++
		return
	}
	p.call, p.descriptor, p.isAsync = c.began, int(e.Result), async
	c.pieces = append(c.pieces, p)
	if hasOffset(p.op) {
		p.offset = e.Offset // aligned, if the block layer's was not
		if e.Bytes > 0 {
			p.bytes = e.Bytes
		}
		j.enter(p)
	}
}

func (j *joiner) findWaiting(e *Event) *piece {
	if e.Op == uint8(vdiskVdiskOpVDISK_ZERO) {
		// To the block layer it is a write.
		if p := takeFirst(j.waiting, e.Offset, func(p *piece) bool { return p.op == write && p.how == vdiskVdiskHandVDISK_HAND_THREAD }); p != nil {
			p.op, p.bytes = e.Op, e.Bytes
			return p
		}
	}
	if !hasOffset(e.Op) {
		// The block layer did not name it; a flush takes a flush's piece first, and other calls one for zeros.
		i := slices.IndexFunc(j.unnamed, func(p *piece) bool { return (p.of.op == e.Op) == (e.Op == uint8(vdiskVdiskOpVDISK_FLUSH)) })
		if i < 0 && len(j.unnamed) > 0 {
			i = 0
		}
		if i < 0 {
			return nil
		}
		p := j.unnamed[i]
		j.unnamed = slices.Delete(j.unnamed, i, i+1)
		p.op, p.offset, p.bytes = e.Op, e.Offset, e.Bytes
		return p
	}
	fits := func(p *piece) bool { return p.op == e.Op }
	if p := takeFirst(j.waiting, e.Offset, fits); p != nil {
		return p
	}
	// An unaligned request is read and written with its surroundings.
	for offset, all := range j.waiting {
		if offset > e.Offset && offset < e.Offset+e.Bytes && slices.ContainsFunc(all, fits) {
			return takeFirst(j.waiting, offset, fits)
		}
	}
	return nil
}

// hasOffset reports whether the block layer reports the offset of a request with this operation in a file.
func hasOffset(op uint8) bool {
	return op == uint8(vdiskVdiskOpVDISK_READ) || op == uint8(vdiskVdiskOpVDISK_WRITE)
}

// takeFirst removes and returns the first one that fits; nil: there is none.
func takeFirst[K comparable, T any](from map[K][]*T, key K, fits func(*T) bool) *T {
	all := from[key]
	i := slices.IndexFunc(all, fits)
	if i < 0 {
		return nil
	}
	one := all[i]
	if len(all) == 1 {
		delete(from, key)
	} else {
		from[key] = slices.Delete(all, i, i+1)
	}
	return one
}

func (j *joiner) returned(e *Event) {
	c := j.calls[e.TID]
	if c == nil {
		return
	}
	delete(j.calls, e.TID)
	for _, p := range c.pieces {
		p.ret = e.TimeNs
		// The driver's request of a flush has no bio, so it cannot be told apart.
		for _, b := range p.bios {
			if b.bytes == 0 && b.ended == 0 {
				j.ended(b, e.TimeNs)
			}
		}
		if !p.isAsync {
			j.leave(p)
			if p.of.isBare {
				p.of.end = e.TimeNs
			}
		}
	}
}

// leave takes the end of a piece in the kernel.
func (j *joiner) leave(p *piece) {
	takeFirst(j.under, p.offset, func(o *piece) bool { return o == p })
}

func (j *joiner) queued(e *Event) {
	b := &bio{queued: e.TimeNs, device: e.Device, sector: e.Offset, bytes: e.Bytes, left: e.Bytes, isForeign: e.IsForeign != 0, inode: e.Inode, fileDevice: e.FileDevice}
	j.descend(e.Id, b)
	p := j.pieceOf(e, b)
	if p == nil {
		j.strayBios++
		return
	}
	if e.Inode != 0 {
		if e.Position == p.offset && len(p.bios) == 0 {
			j.direct[e.Other] = 0 // an earlier request may have had the address
		}
		if e.Result > 0 { // with holes between bios
			j.direct[e.Other] = uint64(e.Result - 1)
		}
		b.fileOffset = e.Position + j.direct[e.Other]
		j.direct[e.Other] += e.Bytes
	}
	p.bios = append(p.bios, b)
	j.bios[e.Id] = b
	j.owners[b] = p
}

// descend finds the bio that device mapper made this one of, and its place in the file.
func (j *joiner) descend(id uint64, b *bio) {
	remap, is := j.remaps[id]
	if !is {
		return
	}
	delete(j.remaps, id)
	for _, other := range j.bios {
		if other.device == uint32(remap.Other) && other.covers(remap.Offset, remap.Bytes) {
			b.parent, b.above = other, remap.Offset
			if other.inode != 0 && b.inode == 0 {
				b.inode, b.fileDevice, b.generation = other.inode, other.fileDevice, other.generation
				b.fileOffset = other.fileOffset + (remap.Offset-other.sector)*512
			}
			return
		}
	}
}

func (j *joiner) pieceOf(e *Event, b *bio) *piece {
	if b.parent != nil {
		return j.owners[b.parent]
	}
	if c := j.calls[e.TID]; c != nil && !b.isForeign {
		for _, p := range c.pieces {
			if len(c.pieces) == 1 && !p.isAsync || e.Inode != 0 && p.offset == e.Position && p.op == e.Op {
				return p
			}
		}
	}
	if e.Inode == 0 {
		return nil
	}
	for _, p := range j.under[e.Position] {
		if p.op == e.Op && !p.isFull() {
			return p
		}
	}
	return nil
}

// isFull reports whether all of its bytes are in bios.
func (p *piece) isFull() bool {
	sum := uint64(0)
	for _, b := range p.bios {
		if b.parent == nil {
			sum += b.bytes
		}
	}
	return p.bytes > 0 && sum >= p.bytes
}

func (b *bio) covers(sector, bytes uint64) bool {
	return b.ended == 0 && sector >= b.sector && sector+bytes/512 <= b.sector+b.bytes/512
}

func (j *joiner) whole(device uint32) uint32 {
	if w, is := j.wholes[device]; is {
		return w
	}
	return device
}

func (j *joiner) issued(e *Event) {
	t := &transfer{op: e.Op, unfollowed: e.Result, issued: e.TimeNs, device: e.Device, sector: e.Offset, bytes: e.Bytes}
	seen := map[*bio]bool{}
	for _, b := range j.bios {
		if !seen[b] && b.ended == 0 && j.whole(b.device) == e.Device && b.sector < e.Offset+(e.Bytes+511)/512 && e.Offset < b.sector+(b.bytes+511)/512 {
			seen[b] = true
			t.bios = append(t.bios, b)
			b.transfers = append(b.transfers, t)
		}
	}
	if len(t.bios) > 0 {
		j.transfers[e.Id] = t
	}
}

func (j *joiner) completed(e *Event) {
	t := j.transfers[e.Id]
	if t == nil {
		return
	}
	t.completed, t.failed = e.TimeNs, e.Result
	from, to := e.Offset, e.Offset+e.Bytes/512
	if e.Bytes >= t.bytes || to >= t.sector+t.bytes/512 {
		delete(j.transfers, e.Id)
	}
	for _, b := range t.bios {
		begin, end := max(from, b.sector), min(to, b.sector+b.bytes/512)
		if begin < end {
			b.left -= min(b.left, (end-begin)*512)
		}
		if b.left == 0 {
			j.ended(b, e.TimeNs)
		}
	}
}

func (j *joiner) ended(b *bio, at uint64) {
	b.ended = at
	for id, one := range j.bios {
		if one == b {
			delete(j.bios, id)
		}
	}
	p := j.owners[b]
	delete(j.owners, b)
	if b.parent != nil {
		b.parent.left -= min(b.parent.left, b.bytes)
		if b.parent.left == 0 && b.parent.ended == 0 {
			j.ended(b.parent, at)
		}
	}
	if p == nil || !p.isAsync || !p.isFull() || slices.ContainsFunc(p.bios, func(b *bio) bool { return b.ended == 0 }) {
		return
	}
	j.leave(p)
	if p.of.isBare {
		p.of.end = at
	}
}
