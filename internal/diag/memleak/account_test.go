package memleak

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"
)

// fixed names allocations by their numbers.
type fixed struct {
	stacks map[int32][]uint64
	missed map[int32]uint64
}

func (f fixed) frames(a Allocation) []uint64 { return f.stacks[a.Stack] }
func (f fixed) cache(key uint64) string      { return fmt.Sprint("cache", key) }
func (f fixed) unfreed(stack int32) uint64   { return f.missed[stack] }
func function(address uint64) string         { return functions[address] }
func anAccount(f fixed, sample uint32) *account {
	return newAccount(time.Second, sample, f, function, true)
}

var functions = map[uint64]string{1: "leaks+0x1", 2: "churns+0x2", 3: "do_syscall_64+0x3", 4: "alloc_pages_noprof+0x4", 5: "allocate_slab+0x5",
	6: "asm_sysvec_timer+0x6", 7: "interrupted+0x7", 8: "other+0x8"}

const second = uint64(time.Second)

// over gives an account the live allocations of each second, and returns the last rows.
func over(a *account, seconds int, live func(second int) []Allocation, missed func(second int) map[Kind]uint64) (s Snapshot) {
	for n := 1; n <= seconds; n++ {
		m := map[Kind]uint64{}
		if missed != nil {
			m = missed(n)
		}
		s = a.take(live(n), uint64(n)*second, float64(n), m, map[uint64]string{1: "", 7: "/a.slice"})
	}
	return s
}

// leak is n allocations a second since the start.
func leak(n int, stack int32) func(int) []Allocation {
	return func(now int) (all []Allocation) {
		for at := range now {
			for i := range n {
				all = append(all, Allocation{Address: uint64(stack)<<32 | uint64(at*n+i), Bytes: 10, Birth: uint64(at) * second, Stack: stack, Cgroup: 7})
			}
		}
		return all
	}
}

func TestALeakGrows(t *testing.T) {
	a := anAccount(fixed{stacks: map[int32][]uint64{1: {1, 3}, 2: {2, 3}}}, 1)
	random := rand.New(rand.NewPCG(1, 2))
	s := over(a, 12, func(now int) []Allocation {
		all := leak(2, 1)(now)
		for i := range random.IntN(5000) { // larger by far, and young
			all = append(all, Allocation{Address: uint64(i), Bytes: 1 << 20, Birth: uint64(now)*second - 1 - random.Uint64N(second), Stack: 2, Cgroup: 1})
		}
		return all
	}, nil)
	r := s.Rows[0]
	if len(s.Rows) != 2 || r.State != Growing || !reflect.DeepEqual(r.Stack, []string{"leaks+0x1", "do_syscall_64+0x3"}) || r.Live != 24 || r.Growth != 2 || r.Rate != 20 || r.Oldest != 12 {
		t.Errorf("%+v", r)
	}
	if want := []Share{{"/a.slice", 24, 240}}; !reflect.DeepEqual(r.Cgroups, want) || len(r.Addresses) != 24 || r.Addresses[0].Age != 12 {
		t.Errorf("%+v", r)
	}
	if s.Rows[1].State != Steady {
		t.Errorf("%+v", s.Rows[1])
	}
	few := anAccount(fixed{stacks: map[int32][]uint64{1: {1, 3}}}, 1)
	if s := over(few, pointsLeast-1, leak(2, 1), nil); s.Rows[0].State != Early {
		t.Errorf("too few intervals: %+v", s.Rows[0])
	}
}

// TestWhatIsNoLeak has populations that come to rest, or come and go.
func TestWhatIsNoLeak(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	alive := func(n int, births func(i int) int) []Allocation {
		var all []Allocation
		for i := range n {
			all = append(all, Allocation{Address: uint64(i), Bytes: 10, Birth: uint64(max(0, births(i))) * second, Stack: 1})
		}
		return all
	}
	for name, live := range map[string]func(int) []Allocation{
		"a step":        func(now int) []Allocation { return alive(map[bool]int{true: 100}[now > 5], func(int) int { return 5 }) },
		"a cache":       func(now int) []Allocation { return alive(100, func(i int) int { return now - i%10 }) },
		"a random walk": func(now int) []Allocation { return alive(50+random.IntN(50), func(int) int { return now - 5 }) },
		"saw teeth":     func(now int) []Allocation { return alive(10*(now%7), func(int) int { return now - 5 }) },
		"one fall": func(now int) []Allocation {
			return alive(map[bool]int{true: 3 * now, false: now}[now < 15], func(int) int { return 0 })
		},
	} {
		a := anAccount(fixed{stacks: map[int32][]uint64{1: {1, 3}}}, 1)
		over(a, 60, func(now int) []Allocation {
			// The first tooth cannot be told from a leak.
			if now > 25 {
				for _, r := range a.take(live(now), uint64(now)*second, float64(now), nil, nil).Rows {
					if r.State != Steady {
						t.Errorf("%s: %+v", name, r)
					}
				}
				return nil
			}
			return live(now)
		}, nil)
	}
}

// TestSlowLeaksGrow: one allocation in twelve intervals is not enough for the latest eight, and is for the whole time.
func TestSlowLeaksGrow(t *testing.T) {
	a := anAccount(fixed{stacks: map[int32][]uint64{1: {1, 3}}}, 1)
	s := over(a, 300, func(now int) (all []Allocation) {
		for at := 0; at < now; at += 12 {
			all = append(all, Allocation{Address: uint64(at), Bytes: 1, Birth: uint64(at) * second, Stack: 1})
		}
		return all
	}, nil)
	if s.Rows[0].State != Growing || s.Rows[0].Growth < 0.05 || s.Rows[0].Growth > 0.12 {
		t.Errorf("%+v", s.Rows[0])
	}
}

func TestMissedFreesMakeUnsure(t *testing.T) {
	f := fixed{stacks: map[int32][]uint64{1: {1, 3}}, missed: map[int32]uint64{}}
	for missed, want := range map[int]State{1: Growing, 2: Unsure} {
		s := over(anAccount(f, 1), 10, leak(2, 1), func(now int) map[Kind]uint64 { return map[Kind]uint64{Kmalloc: uint64(missed * now)} })
		if s.Rows[0].State != want {
			t.Errorf("%d missed of 2 a second: %+v", missed, s.Rows[0])
		}
	}
	s := over(anAccount(f, 1), 10, func(now int) []Allocation { f.missed[1] = uint64(3 * now); return leak(2, 1)(now) }, nil)
	if s.Rows[0].State != Unsure || s.Rows[0].Unfreed != 30 {
		t.Errorf("frees of this stack were not seen: %+v", s.Rows[0])
	}
}

func TestReclaimableIsNoLeak(t *testing.T) {
	s := over(anAccount(fixed{stacks: map[int32][]uint64{1: {1, 3}}}, 1), 10, func(now int) []Allocation {
		all := leak(3, 1)(now)
		for i := range all {
			all[i].Reclaimable, all[i].Kind, all[i].Cache = true, Slab, 9
		}
		return all
	}, nil)
	if s.Rows[0].State != Reclaimable || s.Rows[0].Cache != "cache9" {
		t.Errorf("%+v", s.Rows[0])
	}
}

// TestRanking: growth before age, and size does not count.
func TestRanking(t *testing.T) {
	rows := []Row{{State: Steady, Oldest: 1, Bytes: 1 << 30}, {State: Growing, Rate: 1}, {State: Steady, Oldest: 9}, {State: Growing, Rate: 5}, {State: Unsure, Rate: 100}}
	slices.SortFunc(rows, compareRows)
	want := []Row{{State: Growing, Rate: 5}, {State: Growing, Rate: 1}, {State: Unsure, Rate: 100}, {State: Steady, Oldest: 9}, {State: Steady, Oldest: 1, Bytes: 1 << 30}}
	if !reflect.DeepEqual(rows, want) {
		t.Errorf("%+v", rows)
	}
}

func TestStacksAreCut(t *testing.T) {
	a := anAccount(fixed{stacks: map[int32][]uint64{1: {4, 1, 6, 7}, 2: {4, 1, 6, 8}, 3: {4, 5, 1}, 4: {}}}, 1)
	one := func(stack int32) Allocation {
		return Allocation{Address: uint64(stack), Bytes: 4096, Kind: Pages, Stack: stack}
	}
	s := a.take([]Allocation{one(1), one(2), one(3), one(4)}, second, 1, nil, nil)
	if s.Backing != 4096 || s.Live != 3 || len(s.Rows) != 2 {
		t.Fatalf("%+v", s)
	}
	for _, r := range s.Rows {
		if want := map[uint64][]string{2: {"leaks+0x1"}, 1: {}}[r.Live]; !reflect.DeepEqual(r.Stack, want) {
			t.Errorf("%+v", r)
		}
	}
}

// TestEstimateIsUnbiased draws samples of 1/8 of 800: the mean is 800, and 95 % are within the error.
func TestEstimateIsUnbiased(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	const turns, all = 400, 800
	sum, within := 0.0, 0
	for range turns {
		var sample []Allocation
		for i := range all {
			if random.IntN(8) == 0 {
				sample = append(sample, Allocation{Address: uint64(i), Bytes: 64, Stack: 1})
			}
		}
		e := anAccount(fixed{}, 8).take(sample, second, 1, nil, nil).Rows[0].Estimate
		sum += float64(e.Live)
		if e.Live+e.LiveError >= all && e.Live <= all+e.LiveError {
			within++
		}
		if e.Bytes != 64*e.Live || e.BytesError < 63*e.LiveError || e.BytesError > 65*e.LiveError {
			t.Fatalf("%+v", e)
		}
	}
	if mean := sum / turns; mean < 790 || mean > 810 || within < turns*91/100 {
		t.Errorf("mean %v, %d of %d within", mean, within, turns)
	}
}

// TestSampleIsThatOfThePrograms: halves nest, and neighbours among addresses are spread.
func TestSampleIsThatOfThePrograms(t *testing.T) {
	count := 0
	for i := range uint64(1 << 14) {
		address := 0xffff888100000000 + i*256
		if isSampled(address, 16) {
			count++
			if !isSampled(address, 8) {
				t.Fatal("what is in a smaller sample is not in the larger one")
			}
		}
	}
	if count < 850 || count > 1200 {
		t.Errorf("%d of %d in a sample of 1/16", count, 1<<14)
	}
}

func TestConfidence(t *testing.T) {
	c := Counts{Kmalloc: {Frees: 49, FreesOlder: 49, FreesBusy: 1, FreesNotRun: 1}, Pages: {FreesOlder: 100, FreesNotRun: 5}}
	if got := c.Confidence(); got != 100*198.0/205 {
		t.Errorf("got %v", got)
	}
	if got := c.missed(); got[Kmalloc] != 2 || got[Slab] != 2 || got[Pages] != 0 {
		t.Errorf("got %v", got)
	}
	if got := (Counts{Vmalloc: {Frees: 1, FreesOlder: 98, Unfreed: 1}}).Confidence(); got != 50 {
		t.Errorf("frees that were found out to be missed: %v", got)
	}
	if got := (Counts{}).Confidence(); got != 100 {
		t.Errorf("nothing was freed: %v", got)
	}
}
