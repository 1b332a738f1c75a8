package io

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"
	"time"
)

// process identifies a process: no later one of this boot has the same values.
type process struct {
	tgid     uint32
	start    uint64 // ns, CLOCK_BOOTTIME
	isKernel bool
}

// charge is the IO on the disks that a process caused with one file in one interval.
type charge struct {
	reads, readBytes, writes, writeBytes uint64
	sizes                                sizes // of the writes; all 0 if they are not counted
}

// sizes are numbers of writes, by size.
type sizes [ioIoConstantIO_SIZES_COUNT]uint64

func sizesOf(counts [ioIoConstantIO_SIZES_COUNT]uint32) (s sizes) {
	for i, n := range counts {
		s[i] = uint64(n)
	}
	return s
}

func (s *sizes) add(more sizes) {
	for i, n := range more {
		s[i] += n
	}
}

// take removes a part of the writes, in each size the same share.
func (s *sizes) take(part, whole uint64) (taken sizes) {
	for i, n := range s {
		taken[i] = share(n, part, whole)
		s[i] -= taken[i]
	}
	return taken
}

func (s *sizes) sum() (n uint64) {
	for _, one := range s {
		n += one
	}
	return n
}

type chargeKey struct {
	process process
	file    file
	// The process only carried it out: the kernel did it for itself, or flushed pages that were written
	// before the watching began.
	unattributed bool
}

// forgetAfter is the time after which pages that were written and not flushed are forgotten: they were deleted before, or
// their last bytes were. The kernel flushes after 30 s (vm.dirty_expire_centisecs), checked every 5 s.
const forgetAfter = 3 * time.Minute

// debt has the bytes that processes have written to the page cache of a file and that are not flushed.
type debt struct {
	bytes map[process]uint64
	last  time.Time
}

// ledger charges flushes to the processes that wrote. A flush has a number of bytes and a file; which of the
// file's pages it flushes does not matter unless several processes write one file, and then each is charged in
// proportion to the bytes that it has written and not been charged for.
type ledger struct {
	debts map[file]debt
	met   map[process]about
}

func newLedger() ledger { return ledger{map[file]debt{}, map[process]about{}} }

// meet remembers the facts of a process, which may have ended when its writes are flushed.
func (l *ledger) meet(p process, a about, now time.Time) {
	if before, known := l.met[p]; known && before.lastJiffies > a.lastJiffies {
		return
	}
	a.last = now
	l.met[p] = a
}

// settle charges the counts of an interval. The charges' bytes add up to the bytes of the counts.
func (l *ledger) settle(counts map[rowKey]counted, now time.Time) map[chargeKey]charge {
	charges := map[chargeKey]charge{}
	flushes := map[file]map[process]charge{} // as writes of the task that flushes
	for key, n := range counts {
		p := process{key.Tgid, key.StartNs, key.IsKernel != 0}
		if n.DirtiedBytes > 0 {
			d := l.debts[key.File]
			if d.bytes == nil {
				d.bytes = map[process]uint64{}
			}
			d.bytes[p] += n.DirtiedBytes
			d.last = now
			l.debts[key.File] = d
		}
		if n.Flushes > 0 {
			if flushes[key.File] == nil {
				flushes[key.File] = map[process]charge{}
			}
			flushes[key.File][p] = charge{writes: n.Flushes, writeBytes: n.FlushedBytes, sizes: sizesOf(n.FlushSizes)}
		}
		if n.Reads > 0 || n.Writes > 0 {
			add(charges, chargeKey{p, key.File, p.isKernel},
				charge{reads: n.Reads, readBytes: n.ReadBytes, writes: n.Writes, writeBytes: n.WrittenBytes, sizes: sizesOf(n.WriteSizes)})
		}
	}
	for f, by := range flushes {
		l.flush(charges, f, by)
	}
	for f, d := range l.debts {
		if len(d.bytes) == 0 || now.Sub(d.last) > forgetAfter {
			delete(l.debts, f)
		}
	}
	for p, a := range l.met {
		if now.Sub(a.last) > forgetAfter {
			delete(l.met, p)
		}
	}
	return charges
}

// flush charges the flushes of one file: to the writers as far as they owe it, and the rest, which was
// written before the watching began, to no process.
func (l *ledger) flush(charges map[chargeKey]charge, f file, by map[process]charge) {
	left := charge{}
	var flusher process // the process with the most
	for p, c := range by {
		left.writes += c.writes
		left.writeBytes += c.writeBytes
		left.sizes.add(c.sizes)
		if most := by[flusher].writeBytes; c.writeBytes > most || c.writeBytes == most && p.tgid < flusher.tgid {
			flusher = p
		}
	}
	owes := l.debts[f].bytes
	owed := uint64(0)
	for _, bytes := range owes {
		owed += bytes
	}
	// Each step divides the rest among the remaining debtors, so that rounding loses nothing.
	debtors := slices.SortedFunc(maps.Keys(owes), func(a, b process) int {
		return cmp.Or(cmp.Compare(a.tgid, b.tgid), cmp.Compare(a.start, b.start))
	})
	for _, p := range debtors {
		bytes := min(owes[p], left.writeBytes)
		if owed > left.writeBytes {
			bytes = share(left.writeBytes, owes[p], owed)
		}
		isSized := left.sizes.sum() == left.writes
		requests, bySize := share(left.writes, bytes, left.writeBytes), left.sizes.take(bytes, left.writeBytes)
		if isSized {
			requests = bySize.sum() // so that sizes add up to requests
		}
		add(charges, chargeKey{p, f, p.isKernel}, charge{writes: requests, writeBytes: bytes, sizes: bySize})
		left.writes -= requests
		left.writeBytes -= bytes
		owed -= owes[p]
		if owes[p] -= bytes; owes[p] == 0 {
			delete(owes, p)
		}
	}
	add(charges, chargeKey{flusher, f, true}, left)
}

// share returns total × part / whole, rounded down; 0 if whole is 0.
func share(total, part, whole uint64) uint64 {
	if whole == 0 {
		return 0
	}
	high, low := bits.Mul64(total, part)
	result, _ := bits.Div64(high, low, whole)
	return result
}

func add(charges map[chargeKey]charge, key chargeKey, c charge) {
	if c.reads+c.writes+c.readBytes+c.writeBytes == 0 {
		return
	}
	sum := charges[key]
	sum.reads += c.reads
	sum.readBytes += c.readBytes
	sum.writes += c.writes
	sum.writeBytes += c.writeBytes
	sum.sizes.add(c.sizes)
	charges[key] = sum
}
