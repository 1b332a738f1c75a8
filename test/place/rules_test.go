package place_test

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// nobody is a reference to no backend.
var nobody reconcile.BackendRef

// kind is the kind of a packet, and of an entry's last packets: it determines the time for which the
// entry may be idle.
type kind int

const (
	syn  kind = iota // of an entry: no other packet has been seen
	data             // any packet in the middle of a flow
	fin
	rst
	udp
)

func (k kind) String() string { return [...]string{"syn", "data", "fin", "rst", "udp"}[k] }

// timeout is the time for which a flow with last packets of this kind may be idle.
func (k kind) timeout() time.Duration {
	return [...]time.Duration{syn: timeouts.TCPHandshake, data: timeouts.TCPEstablished,
		fin: halfClosed, rst: timeouts.TCPClosing, udp: timeouts.UDP}[k]
}

// entry is a remembered flow or client, as in the document.
type entry struct {
	backend reconcile.BackendRef
	service uint32 // its reference
	hash    uint32
	kind    kind
	client  bool
	seen    time.Duration
}

// rules are the document's first table, in Go, beside the program.
type rules struct {
	*witness
	now     time.Duration
	entries map[flowKey]*entry
	isThere func(flowKey) bool // in the program's table, for cases that the document leaves open
	// drains reports whether a backend has weight 0 in a service, from the configuration; known is
	// false while a change has failed half-way.
	drains func(record reconcile.ServiceRecord, b model.BackendAddress) (drains, known bool)
}

// packet has the properties of a packet that the rules need.
type packet struct {
	frontend model.Frontend
	client   netip.AddrPort
	kind     kind
	payload  bool
}

// expectation is the outcome that a packet must have.
type expectation struct {
	to reconcile.BackendRef // nobody: the packet is dropped
	// remember is the entry that must be made; nil: none. If it cannot be made, because there is no
	// room or budget, the packet goes to otherwise.
	remember  *entry
	key       flowKey
	otherwise reconcile.BackendRef
	followed  bool
}

func word(b []byte) uint64 { return binary.NativeEndian.Uint64(b) }

func addressWords(a netip.Addr) (high, low uint64) {
	b := a.As16()
	return word(b[:8]), word(b[8:])
}

// keyOf is struct flow_key of bpf/core/types.h.
func keyOf(p packet) (key flowKey) {
	source, destination := p.client.Addr().As16(), p.frontend.Address.As16()
	copy(key[0:], source[:])
	copy(key[16:], destination[:])
	binary.BigEndian.PutUint16(key[32:], p.client.Port())
	binary.BigEndian.PutUint16(key[34:], p.frontend.Ports.First)
	key[36] = byte(p.frontend.Protocol)
	return key
}

// clientKey is the same for a client that keeps its backend.
func clientKey(p packet, service uint32) (key flowKey) {
	source := p.client.Addr().As16()
	copy(key[0:], source[:])
	binary.NativeEndian.PutUint64(key[24:], uint64(service))
	return key
}

// The flow hash is a promise: a fleet whose machines are upgraded one by one has to go on agreeing.
// So it stands here once more: multiply-add with odd constants, then MurmurHash3's finalizer.
var mix = [...]uint64{0x6a09e667f3bcc909, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1, 0x510e527fade682d1}

func hashOf(p packet, record reconcile.ServiceRecord) uint32 {
	high, low := addressWords(p.client.Addr())
	sum := high*mix[0] + low*mix[1]
	if record.AffinityTimeout == 0 {
		key := keyOf(p)
		high, low = addressWords(p.frontend.Address)
		last := uint64(key[36])<<32 | uint64(binary.NativeEndian.Uint16(key[32:]))<<16 | uint64(binary.NativeEndian.Uint16(key[34:]))
		sum += high*mix[2] + low*mix[3] + last*mix[4]
	}
	sum ^= uint64(record.Seed)<<32 | uint64(record.Seed)
	sum ^= sum >> 33
	sum *= 0xff51afd7ed558ccd
	sum ^= sum >> 33
	sum *= 0xc4ceb9fe1a85ec53
	sum ^= sum >> 33
	return uint32(sum >> 32)
}

func position(offset, size, hash uint32) uint32 {
	return offset + uint32(uint64(hash)*uint64(size)>>32)
}

func (r *rules) alive(ref reconcile.BackendRef) bool {
	_, ok := r.backends[ref]
	return ok && ref != nobody
}

func referenceOf(record reconcile.ServiceRecord) uint32 {
	return uint32(record.Generation)<<24 | record.Index
}

// serviceOf returns the service of a frontend.
func (r *rules) serviceOf(f model.Frontend) (reconcile.ServiceRecord, bool) {
	index, ok := r.fronts[f]
	if !ok || !r.ours[f.Address] {
		return reconcile.ServiceRecord{}, false
	}
	record, ok := r.services[index]
	return record, ok && record.Size > 0
}

// previous is the backend of flows without an entry, in a slot in transition.
func (r *rules) previous(record reconcile.ServiceRecord, slot reconcile.Slot, hash uint32) (ref reconcile.BackendRef, drains bool) {
	ref = slot.Previous
	if slot.PreviousBefore && record.BeforeSize > 0 {
		was := r.slots[position(record.BeforeOffset, record.BeforeSize, hash)]
		if ref = was.Current; was.State == reconcile.Transition {
			ref = was.Previous
		}
	}
	if !r.alive(ref) {
		return nobody, false
	}
	if slot.PreviousBefore {
		return ref, r.backends[ref].Draining
	}
	drains, known := r.drains(record, r.backends[ref].BackendAddress)
	if !known {
		drains = slot.PreviousDrains
	}
	return ref, drains
}

// expect returns the outcome that a packet must have, and updates the entries.
func (r *rules) expect(p packet) expectation {
	record, ok := r.serviceOf(p.frontend)
	if !ok {
		return expectation{}
	}
	hash := hashOf(p, record)
	slot := r.slots[position(record.Offset, record.Size, hash)]
	always := record.Tracking == model.TrackingAlways
	if record.Tracking == model.TrackingNone || slot.State == reconcile.Settled && !always {
		return expectation{to: slot.Current}
	}
	service := referenceOf(record)
	key := keyOf(p)
	if e := r.follow(p, key, record); e != nil {
		return expectation{to: e.backend, followed: true}
	}
	own, passedOver := true, nobody
	if record.AffinityTimeout > 0 {
		client := clientKey(p, service)
		if e := r.follow(p, client, record); e != nil {
			return expectation{to: e.backend, followed: true}
		}
		if e := r.entries[client]; e != nil { // it was passed over, because its backend drains
			passedOver = e.backend
		}
		own, key = false, client
	}
	previous, drains := nobody, false
	if slot.State == reconcile.Transition {
		previous, drains = r.previous(record, slot, hash)
	}
	newcomer := p.kind == syn || p.kind == udp
	if !own && newcomer && (drains || passedOver != nobody) {
		own, key, drains = true, keyOf(p), true
	}
	out := expectation{to: slot.Current, key: key}
	stays := previous != nobody && (p.kind != udp && p.kind != syn || !drains) && (!own || p.kind != syn)
	if stays {
		out.to = previous
	}
	out.otherwise = out.to
	switch {
	case passedOver != nobody:
		out.otherwise = passedOver
	case p.kind == syn && previous != nobody:
		out.otherwise = previous
	}
	if (slot.State == reconcile.Transition || always || passedOver != nobody) && p.kind != rst && out.to != nobody {
		out.remember = &entry{backend: out.to, service: service, hash: hash, kind: p.kind, client: !own, seen: r.now}
	}
	return out
}

// follow finds the entry of a key and notes the packet; an entry that is over or whose backend is
// gone is deleted.
func (r *rules) follow(p packet, key flowKey, record reconcile.ServiceRecord) *entry {
	e := r.entries[key]
	if e == nil {
		return nil
	}
	// A SYN opens another connection on a closed one's tuple, or if the entry is of another slot.
	another := p.kind == syn && !e.client && (e.kind == fin || e.kind == rst || e.hash != hashOf(p, record))
	if !r.alive(e.backend) || e.service != referenceOf(record) || r.over(e, record) || another {
		delete(r.entries, key)
		return nil
	}
	if (p.kind == syn || p.kind == udp) && e.client && r.backends[e.backend].Draining {
		return nil
	}
	e.seen = r.now
	e.kind = e.kind.then(p)
	return e
}

// then is the kind of an entry's last packets after another.
func (k kind) then(p packet) kind {
	switch {
	case k == udp, p.kind == rst, p.kind == fin:
		return p.kind
	case p.kind == syn:
		return k
	case k == fin && !p.payload: // the other half goes on
		return fin
	}
	return data
}

func (r *rules) over(e *entry, record reconcile.ServiceRecord) bool {
	timeout := e.kind.timeout()
	if e.client {
		timeout = record.AffinityTimeout
	}
	return r.now-e.seen > timeout
}

// isException reports whether a flow's entry differs from its client's, and so has to stay. A
// client's entry that the same scan deletes may or may not be there any more: one that is over, or
// that its slot agrees with; this slot is not the flow's if affinity is new.
func (r *rules) isException(key flowKey, e *entry, record reconcile.ServiceRecord) bool {
	if record.AffinityTimeout == 0 || e.client || !r.alive(e.backend) {
		return false
	}
	var client flowKey
	copy(client[:16], key[:16])
	binary.NativeEndian.PutUint64(client[24:], uint64(e.service))
	of := r.entries[client]
	if of == nil || of.backend == e.backend {
		return false
	}
	slot := r.slots[position(record.Offset, record.Size, of.hash)]
	agrees := (slot.State == reconcile.Closing || slot.State == reconcile.Marked) && slot.Current == of.backend
	stays := !agrees && !r.over(of, record) && r.alive(of.backend)
	return stays || r.isThere(key)
}

// endStrays ends the flows of backends that have left their service.
func (r *rules) endStrays(members []reconcile.Member) {
	for key, e := range r.entries {
		of := reconcile.Member{Service: e.service & 0xffffff, Generation: uint8(e.service >> 24), Backend: e.backend}
		if !slices.Contains(members, of) {
			delete(r.entries, key)
		}
	}
}

// scan are the entries that a scan must find, and the ones that it must delete.
func (r *rules) scan(found map[uint32]bool) error {
	marked := map[uint32]bool{}
	for _, clients := range []bool{false, true} { // while clients' entries still exist
		r.scanEntries(clients, marked)
	}
	for at := range marked {
		if !found[at] {
			return fmt.Errorf("the scan did not mark slot %d, %+v, where a flow disagrees", at, r.slots[at])
		}
	}
	for at := range found {
		if !marked[at] {
			return fmt.Errorf("the scan marked slot %d, %+v, where no flow disagrees", at, r.slots[at])
		}
	}
	return nil
}

func (r *rules) scanEntries(clients bool, marked map[uint32]bool) {
	for key, e := range r.entries {
		if e.client != clients {
			continue
		}
		record, living := r.services[e.service&0xffffff]
		if !living || referenceOf(record) != e.service || r.over(e, record) {
			delete(r.entries, key)
			continue
		}
		if record.Size == 0 {
			continue
		}
		at := position(record.Offset, record.Size, e.hash)
		slot := r.slots[at]
		if slot.State != reconcile.Closing && slot.State != reconcile.Marked {
			continue
		}
		switch {
		case r.alive(e.backend) && e.backend != slot.Current:
			marked[at] = true
		case record.Tracking == model.TrackingAlways || r.isException(key, e, record):
		default:
			delete(r.entries, key)
		}
	}
}
