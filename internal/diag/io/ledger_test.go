package io

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

var (
	aFile, bFile = file{Inode: 1, Device: 8 << 20}, file{Inode: 2, Device: 8 << 20}
	begin        = time.Unix(1000, 0)
)

func keyOf(f file, tgid uint32, kernel bool) rowKey {
	return rowKey{File: f, Tgid: tgid, StartNs: uint64(tgid), IsKernel: number(kernel)}
}

func who(f file, tgid uint32, kernel, unattributed bool) chargeKey {
	return chargeKey{process{tgid, uint64(tgid), kernel}, f, unattributed}
}

func TestFlushesAreChargedToWriters(t *testing.T) {
	const kworker = 9
	flushBy := func(bytes uint64) map[rowKey]counted {
		return map[rowKey]counted{keyOf(aFile, kworker, true): {Flushes: 4, FlushedBytes: bytes}}
	}
	wrote := func(first, second uint64) map[rowKey]counted {
		return map[rowKey]counted{keyOf(aFile, 1, false): {DirtiedBytes: first}, keyOf(aFile, 2, false): {DirtiedBytes: second}}
	}
	for _, test := range []struct {
		name      string
		intervals []map[rowKey]counted
		want      map[chargeKey]charge // of the last interval
	}{
		{"later", []map[rowKey]counted{wrote(100, 0), flushBy(100)}, map[chargeKey]charge{who(aFile, 1, false, false): {writes: 4, writeBytes: 100}}},
		{"two writers", []map[rowKey]counted{wrote(300, 100), flushBy(400)}, map[chargeKey]charge{
			who(aFile, 1, false, false): {writes: 3, writeBytes: 300}, who(aFile, 2, false, false): {writes: 1, writeBytes: 100}}},
		{"half of it", []map[rowKey]counted{wrote(300, 100), flushBy(200)}, map[chargeKey]charge{
			who(aFile, 1, false, false): {writes: 3, writeBytes: 150}, who(aFile, 2, false, false): {writes: 1, writeBytes: 50}}},
		{"the other half", []map[rowKey]counted{wrote(300, 100), flushBy(200), flushBy(200)}, map[chargeKey]charge{
			who(aFile, 1, false, false): {writes: 3, writeBytes: 150}, who(aFile, 2, false, false): {writes: 1, writeBytes: 50}}},
		{"written before", []map[rowKey]counted{flushBy(100)}, map[chargeKey]charge{who(aFile, kworker, true, true): {writes: 4, writeBytes: 100}}},
		{"in part written before", []map[rowKey]counted{wrote(100, 0), flushBy(400)}, map[chargeKey]charge{
			who(aFile, 1, false, false): {writes: 1, writeBytes: 100}, who(aFile, kworker, true, true): {writes: 3, writeBytes: 300}}},
	} {
		l := newLedger()
		var got map[chargeKey]charge
		for _, counts := range test.intervals {
			got = l.settle(counts, begin)
		}
		if len(got) != len(test.want) {
			t.Errorf("%s: got %+v", test.name, got)
		}
		for key, want := range test.want {
			if got[key] != want {
				t.Errorf("%s: %+v has %+v, want %+v", test.name, key, got[key], want)
			}
		}
	}
}

// TestNothingIsChargedTwiceOrLost: for any counts, the charges add up to them, and nobody is charged for more writes
// to the page cache than it made.
func TestNothingIsChargedTwiceOrLost(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := newLedger()
		amount := rapid.Uint64Range(0, 1<<40)
		dirtied, charged := map[uint32]uint64{}, map[uint32]uint64{}
		for step := range rapid.IntRange(1, 8).Draw(t, "intervals") {
			counts := map[rowKey]counted{}
			var want, got charge
			for range rapid.IntRange(0, 6).Draw(t, "rows") {
				f := rapid.SampledFrom([]file{aFile, bFile}).Draw(t, "file")
				tgid := rapid.Uint32Range(0, 3).Draw(t, "tgid")
				n := counted{Reads: 1, ReadBytes: amount.Draw(t, "read"), Flushes: rapid.Uint64Range(1, 9).Draw(t, "flushes"),
					FlushedBytes: amount.Draw(t, "flushed"), DirtiedBytes: amount.Draw(t, "dirtied")}
				counts[keyOf(f, tgid, tgid == 0)] = n
			}
			for key, n := range counts {
				want.reads, want.readBytes = want.reads+n.Reads, want.readBytes+n.ReadBytes
				want.writes, want.writeBytes = want.writes+n.Flushes, want.writeBytes+n.FlushedBytes
				dirtied[key.Tgid] += n.DirtiedBytes
			}
			for key, n := range l.settle(counts, begin.Add(time.Duration(step)*time.Second)) {
				got.reads, got.readBytes = got.reads+n.reads, got.readBytes+n.readBytes
				got.writes, got.writeBytes = got.writes+n.writes, got.writeBytes+n.writeBytes
				if !key.unattributed {
					charged[key.process.tgid] += n.writeBytes
				}
			}
			if got != want {
				t.Fatalf("the charges are %+v, and the counts %+v", got, want)
			}
		}
		for tgid, bytes := range charged {
			if bytes > dirtied[tgid] {
				t.Fatalf("process %d wrote %d bytes and is charged for %d", tgid, dirtied[tgid], bytes)
			}
		}
	})
}

func TestOldDebtsAreForgotten(t *testing.T) {
	l := newLedger()
	l.meet(process{1, 1, false}, about{comm: "a"}, begin)
	l.settle(map[rowKey]counted{keyOf(aFile, 1, false): {DirtiedBytes: 100}}, begin)
	l.settle(nil, begin.Add(forgetAfter))
	if len(l.debts) != 1 || len(l.met) != 1 {
		t.Errorf("forgotten too early: %+v", l)
	}
	l.settle(nil, begin.Add(forgetAfter+time.Second))
	if len(l.debts) != 0 || len(l.met) != 0 {
		t.Errorf("not forgotten: %+v", l)
	}
}

// TestSizesOfWritesAddUp has flushes of several sizes divided among writers: no write and no size is lost by rounding.
func TestSizesOfWritesAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := newLedger()
		var want [ioIoConstantIO_SIZES_COUNT]uint32
		n := uint64(0)
		for i := range want {
			want[i] = rapid.Uint32Range(0, 9).Draw(t, "writes of a size")
			n += uint64(want[i])
		}
		owed := rapid.SliceOfN(rapid.Uint64Range(1, 1<<20), 1, 4).Draw(t, "owed")
		counts := map[rowKey]counted{keyOf(aFile, 99, true): {Flushes: n, FlushedBytes: rapid.Uint64Range(1, 1<<21).Draw(t, "flushed"), FlushSizes: want}}
		for i, bytes := range owed {
			counts[keyOf(aFile, uint32(i)+1, false)] = counted{DirtiedBytes: bytes}
		}
		var got sizes
		requests := uint64(0)
		for key, c := range l.settle(counts, begin) {
			if c.sizes.sum() != c.writes {
				t.Errorf("%+v has %d writes, and by size %v", key, c.writes, c.sizes)
			}
			got.add(c.sizes)
			requests += c.writes
		}
		if got != sizesOf(want) || requests != n {
			t.Errorf("got %d writes, by size %v; want %d, %v", requests, got, n, want)
		}
	})
}
