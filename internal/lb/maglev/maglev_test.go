package maglev

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// backends returns n members 10.0.x.y:8080 of the given weights, repeated as needed.
func backends(n int, weights ...uint32) []Member {
	members := make([]Member, n)
	for i := range members {
		address := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		members[i] = Member{
			Key:    Key(model.Backend{BackendAddress: model.BackendAddress{Address: address, Port: 8080}}),
			Weight: weights[i%len(weights)],
		}
	}
	return members
}

func shares(table []int32, n int) []int {
	counts := make([]int, n)
	for _, member := range table {
		counts[member]++
	}
	return counts
}

func TestSizes(t *testing.T) {
	for _, size := range Sizes {
		if !big.NewInt(int64(size)).ProbablyPrime(20) {
			t.Errorf("size %d is not a prime", size)
		}
	}
	for _, c := range []struct {
		backends int
		size     uint32
	}{{0, 4093}, {1, 4093}, {40, 4093}, {41, 16381}, {163, 16381}, {164, 65521}, {655, 65521}, {656, 131071}, {100000, 131071}} {
		if got := SizeFor(c.backends); got != c.size {
			t.Errorf("SizeFor(%d) = %d, want %d", c.backends, got, c.size)
		}
	}
}

func TestSharesFollowWeights(t *testing.T) {
	for _, weights := range [][]uint32{{1}, {1, 2}, {1, 2, 5}, {100, 150}, {3, 65535}, {65535}, {10, 0, 20}} {
		const n = 12
		members := backends(n, weights...)
		table := Table(8191, Seed("web"), members)
		total := 0
		for _, m := range members {
			total += int(m.Weight)
		}
		for i, got := range shares(table, n) {
			want := float64(len(table)) * float64(members[i].Weight) / float64(total)
			// Every member has its turns in every round, so the last, cut-off round
			// is the only inaccuracy: two slots.
			if diff := float64(got) - want; diff < -2 || diff > 2 {
				t.Errorf("weights %v: member %d has %d slots, want %.1f", weights, i, got, want)
			}
			if members[i].Weight == 0 && got != 0 {
				t.Errorf("weights %v: member %d of weight 0 has %d slots", weights, i, got)
			}
		}
	}
}

func TestNobodyToChoose(t *testing.T) {
	for name, members := range map[string][]Member{"none": nil, "weightless": backends(3, 0)} {
		table := Table(251, 1, members)
		if len(table) != 251 || slices.ContainsFunc(table, func(i int32) bool { return i != -1 }) {
			t.Errorf("%s: want 251 entries of -1, got %v", name, table)
		}
	}
	if table := Table(0, 1, backends(3, 1)); len(table) != 0 {
		t.Errorf("size 0: got %d entries", len(table))
	}
}

func TestOrderDoesNotMatter(t *testing.T) {
	members := backends(40, 1, 2, 3, 0)
	table := Table(4093, Seed("web"), members)
	random := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		shuffled := slices.Clone(members)
		random.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		for slot, member := range Table(4093, Seed("web"), shuffled) {
			if shuffled[member] != members[table[slot]] {
				t.Fatalf("slot %d depends on the order of the members", slot)
			}
		}
	}
}

func TestSeedsDiffer(t *testing.T) {
	members := backends(10, 1)
	a, b := Table(1021, Seed("web"), members), Table(1021, Seed("dns"), members)
	same := 0
	for slot := range a {
		if a[slot] == b[slot] {
			same++
		}
	}
	// Independent tables agree in a tenth of the slots.
	if same > 200 {
		t.Errorf("two services place %d of 1021 slots alike", same)
	}
}

// TestGolden holds for as long as shunt exists: nodes of different versions work in one
// fleet, and a table that moves on upgrade moves connections.
func TestGolden(t *testing.T) {
	if got := Seed("web"); got != 0x0fd9bc91 {
		t.Errorf(`Seed("web") = %#x`, got)
	}
	members := backends(20, 1, 2, 7)
	members = append(members, Member{
		Key:    Key(model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("2001:db8::1"), Port: 80}}),
		Weight: 3,
	})
	hash := sha256.New()
	for _, member := range Table(2039, Seed("web"), members) {
		hash.Write(binary.BigEndian.AppendUint16(nil, uint16(member)))
	}
	if got := fmt.Sprintf("%x", hash.Sum(nil)); got != "3a6a64f94be3e595f1c2594219fb6ab1ed51ac9a47206ca2093a66178f21ff90" {
		t.Errorf("the table of the golden members changed: its SHA-256 is %s", got)
	}
}

func TestRemovalMovesLittleElse(t *testing.T) {
	for _, n := range []int{2, 3, 5, 10, 20, 100, 600} {
		members := backends(n, 1)
		size := SizeFor(n)
		before := Table(size, Seed("web"), members)
		worst, sum := 0.0, 0.0
		tries := min(n, 20)
		for gone := range tries {
			rest := slices.Clone(members)
			rest[gone].Weight = 0
			moved, others := 0, 0
			for slot, member := range Table(size, Seed("web"), rest) {
				if int(member) == gone {
					t.Fatalf("n %d: slot %d still names the removed member", n, slot)
				}
				if int(before[slot]) != gone {
					others++
					if member != before[slot] {
						moved++
					}
				}
			}
			share := float64(moved) / float64(max(others, 1))
			worst, sum = max(worst, share), sum+share
		}
		t.Logf("%4d members, %6d slots: a removal moves %.2f %% of the others' slots, at worst %.2f %%",
			n, size, 100*sum/float64(tries), 100*worst)
		if sum/float64(tries) > 0.05 {
			t.Errorf("%d members: more than 5 %% of the others' slots move", n)
		}
	}
}

func TestLargestTableIsFast(t *testing.T) {
	for name, members := range map[string][]Member{
		"equal":    backends(1310, 1),
		"lopsided": append(backends(1309, 1), Member{Key: "heavy", Weight: 65535}),
	} {
		start := time.Now()
		Table(131071, 1, members)
		took := time.Since(start)
		t.Logf("%s weights: %v", name, took)
		// A tenth of a second is usual, 60 times that under the race detector on a busy
		// machine. The limit finds a table that would never be complete.
		if took > 30*time.Second {
			t.Errorf("%s weights: 131071 slots of 1310 members took %v", name, took)
		}
	}
}

func BenchmarkTable(b *testing.B) {
	members := backends(1310, 1, 2, 3)
	for b.Loop() {
		Table(131071, 1, members)
	}
}

// TestNameDecidesTheSlots: a backend's slots depend on its name, or on its address if it has no name.
func TestNameDecidesTheSlots(t *testing.T) {
	at := func(text, name string) model.Backend {
		return model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr(text), Port: 80}, Name: name}
	}
	first, second := at("10.0.0.1", "green"), at("10.0.0.2", "green")
	if Key(first) != Key(second) {
		t.Error("a server that takes over a name has other slots")
	}
	if plain := at("10.0.0.1", ""); Key(plain) == Key(first) || Key(plain) != Key(at("10.0.0.1", "10.0.0.1:80")) {
		t.Error("the name that is the address, which the configuration fills in, counts as one")
	}
	if Key(at("10.0.0.1", "a")) == Key(at("10.0.0.1", "b")) {
		t.Error("two names have the same slots")
	}
}
