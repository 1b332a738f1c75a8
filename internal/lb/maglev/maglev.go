// Package maglev computes the slot tables that place flows on backends: Maglev hashing
// (Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer", NSDI
// 2016, section 3.4) with weights.
//
// A table is a pure function of the table size, the service's seed and the members'
// keys and weights. Neither the order of the members nor any local id enters it, so
// every balancer of a fleet with the same configuration has the same table.
package maglev

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"io"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Sizes are the table sizes in slots that shunt uses, ascending: for each power of two
// from 2^8 to 2^17 the largest prime below it. A prime size makes every skip of a
// permutation visit every slot.
var Sizes = []uint32{251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521, 131071}

// defaultSizes are the sizes that SizeFor chooses from, few and far apart: a service that crosses from
// one to the next places most of its new flows anew.
var defaultSizes = []uint32{4093, 16381, 65521, 131071}

// slotsPerBackend is the number of slots that a backend should have at least. The paper's section
// 5.3 finds 100 enough for shares within a few percent of each other.
const slotsPerBackend = 100

// SizeFor is the table size in slots of a service that does not say one: the smallest of 4093,
// 16381, 65521 and 131071 with at least 100 slots per backend, or the largest. It depends on
// nothing but the number of backends, so that all balancers of a fleet agree. Up to 40 backends
// share one size, and a change there moves the changed backend's share and at most 3 % of the
// slots beside it.
func SizeFor(backends int) uint32 {
	for _, size := range defaultSizes {
		if int(size)/slotsPerBackend >= backends {
			return size
		}
	}
	return defaultSizes[len(defaultSizes)-1]
}

// Member is one candidate for slots.
type Member struct {
	Key    string // identity, the same on every node; distinct within a table
	Weight uint32 // share relative to the other members; 0 gets no slot
}

// Key returns the identity of a backend. If the backend has a configured name, it is this name behind a
// zero byte: a backend that takes over a name takes over its slots, and no other slot moves. Otherwise it
// is the address as 16 bytes, IPv4 mapped, then the port in network byte order. Among addresses that
// begin with a zero byte, mapped IPv4 addresses have more zero bytes, which no name has, and the rest is
// reserved (RFC 4291, 2.4).
func Key(b model.Backend) string {
	if b.Name != "" && b.Name != b.BackendAddress.String() {
		return "\x00" + b.Name
	}
	address := b.Address.As16()
	return string(binary.BigEndian.AppendUint16(address[:], b.Port))
}

// Seed makes one service's table, and its flow hash, differ from another's:
// 32-bit FNV-1a of the name's bytes. It never changes for a name: a fleet that is
// upgraded node by node has to go on agreeing.
func Seed(serviceName string) uint32 {
	hash := fnv.New32a()
	io.WriteString(hash, serviceName)
	return hash.Sum32()
}

// permutation is the order in which a member asks for slots: offset, offset+skip,
// offset+2*skip and so on, modulo the size.
type permutation struct {
	next, skip uint32
}

// newPermutation derives a permutation from 64-bit FNV-1a of the seed (big endian) and
// the key. FNV alone leaves similar keys with similar upper halves, so the result goes
// through the finalizer of SplitMix64 (Steele et al., OOPSLA 2014, with variant 13 of
// Stafford's constants); the lower half gives the offset, the upper one the skip.
func newPermutation(size, seed uint32, key string) permutation {
	fnv1a := fnv.New64a()
	fnv1a.Write(binary.BigEndian.AppendUint32(nil, seed))
	io.WriteString(fnv1a, key)
	hash := fnv1a.Sum64()
	hash = (hash ^ hash>>30) * 0xbf58476d1ce4e5b9
	hash = (hash ^ hash>>27) * 0x94d049bb133111eb
	hash ^= hash >> 31
	return permutation{next: uint32(hash) % size, skip: uint32(hash>>32)%(size-1) + 1}
}

// contender is a member with a weight while a table is being filled.
type contender struct {
	permutation
	member int32  // its index in the caller's list
	weight uint64 // turns per weightMax rounds
	credit uint64 // weight gathered and not yet spent on a turn
}

// Table assigns every slot to a member: the result has size entries, each an index into
// members. Without a member of weight above 0 all entries are -1.
//
// The members go round in the order of their keys, and each turn takes the first free
// slot of the member's permutation. A member gathers its weight as credit every round
// and pays the largest weight for a turn, so it has weight/largest turns per round.
//
// The size must be a prime, such as the sizes in Sizes; with another size a member may never find
// the free slots. Size 0 gives an empty table.
func Table(size uint32, seed uint32, members []Member) []int32 {
	table := make([]int32, size)
	for i := range table {
		table[i] = -1
	}
	contenders, weightMax := contend(size, seed, members)
	if len(contenders) == 0 || size == 0 {
		return table
	}
	for free := size; ; {
		for i := range contenders {
			c := &contenders[i]
			c.credit += c.weight
			if c.credit < weightMax {
				continue
			}
			c.credit -= weightMax
			for table[c.next] >= 0 {
				c.advance(size)
			}
			table[c.next] = c.member
			c.advance(size)
			if free--; free == 0 {
				return table
			}
		}
	}
}

// advance moves on to the next slot of the permutation.
func (p *permutation) advance(size uint32) {
	if p.next += p.skip; p.next >= size {
		p.next -= size
	}
}

// contend is the members that have a weight, in the order of their keys, and the
// largest weight. For size 0, which has nothing to contend for, it is empty.
func contend(size, seed uint32, members []Member) ([]contender, uint64) {
	if size == 0 {
		return nil, 0
	}
	contenders := make([]contender, 0, len(members))
	weightMax := uint64(0)
	for i, m := range members {
		if m.Weight == 0 {
			continue
		}
		weightMax = max(weightMax, uint64(m.Weight))
		contenders = append(contenders, contender{
			permutation: newPermutation(size, seed, m.Key),
			member:      int32(i), weight: uint64(m.Weight),
		})
	}
	slices.SortFunc(contenders, func(a, b contender) int {
		return cmp.Compare(members[a.member].Key, members[b.member].Key)
	})
	return contenders, weightMax
}
