package ping

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// The verdicts of a balancer's program that affect the path of a probe, by their names in enum verdict.
const (
	verdictDrop   = "drop"
	verdictAnswer = "answer"
)

// stamp has a balancer's times and verdict of a probe or its answer; begin 0: they are not known.
type stamp struct {
	begin, end      uint64 // ns of the balancer's clock
	verdict, reason string
	hook            hook // where the program is
}

// hook is the hook of a balancer's program: XDP or tc.
type hook bool

const (
	hookXDP hook = false
	hookTC  hook = true
)

// String is the hook as JSON has it.
func (h hook) String() string {
	if h == hookTC {
		return "tc"
	}
	return "xdp"
}

// Bits of an entry's flags.
const (
	flagAnswer = 1 << iota
	flagTC
)

// took returns the time for which the program had it, in ns; 0: not known.
func (s stamp) took() int64 { return int64(s.end - s.begin) }

// ends reports whether the probe did not go on from there.
func (s stamp) ends() bool {
	return s.begin != 0 && (s.verdict == verdictDrop || s.verdict == verdictAnswer)
}

// stampEntry is a stamp in a message.
type stampEntry struct {
	sequence uint64
	isAnswer bool
	stamp
}

// Sizes in bytes: of an entry without its words, and of the longest word.
const (
	stampBytes = 27
	wordBytes  = 64
)

// append adds the entry to a message: three numbers in network order, flags, and two words with their lengths before them.
func (e stampEntry) append(b []byte) []byte {
	for _, n := range []uint64{e.sequence, e.begin, e.end} {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	verdict, reason := e.verdict[:min(len(e.verdict), wordBytes)], e.reason[:min(len(e.reason), wordBytes)]
	b = append(b, byte(number(e.isAnswer)*flagAnswer|number(bool(e.hook))*flagTC), byte(len(verdict)), byte(len(reason)))
	return append(append(b, verdict...), reason...)
}

// parseStamps reads the entries of a message, which must have exactly this number.
func parseStamps(b []byte, count uint64) ([]stampEntry, error) {
	var all []stampEntry
	for uint64(len(all)) < count {
		if len(b) < stampBytes || len(b) < stampBytes+int(b[25])+int(b[26]) {
			return nil, fmt.Errorf("decode %d stamps of a balancer: the message ends after %d", count, len(all))
		}
		if b[24]&^(flagAnswer|flagTC) != 0 {
			return nil, fmt.Errorf("decode the stamps of a balancer: there are no flags %#x", b[24])
		}
		verdict, reason := stampBytes+int(b[25]), stampBytes+int(b[25])+int(b[26])
		all = append(all, stampEntry{binary.BigEndian.Uint64(b), b[24]&flagAnswer != 0, stamp{binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:]),
			printable(b[stampBytes:verdict]), printable(b[verdict:reason]), hook(b[24]&flagTC != 0)}})
		b = b[reason:]
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("decode %d stamps of a balancer: %d bytes are left", count, len(b))
	}
	return all, nil
}

// stampWait is the interval at which a server on a balancer looks for stamps: they do not wake it.
const stampWait = 2 * time.Millisecond

// relay sends clients the stamps of the balancers on this host for their probes. The zero value has no balancers.
type relay struct {
	rings   *kernel.StampRings
	looked  time.Time             // when it last looked for other rings
	clients map[uint64]netip.Addr // by session: the address that its probes come from
	ready   []relayed
	message []byte
}

type relayed struct {
	session uint64
	to      netip.Addr
	stampEntry
}

// ringsWait is the interval at which a server looks for instances that have begun to stamp probes, or ended.
const ringsWait = 100 * time.Millisecond

// openRelay opens the stamps of the instances that have some. The caller closes the relay.
func openRelay(root string) (relay, error) {
	rings, err := kernel.OpenStampRings(root)
	return relay{rings: rings, looked: time.Now(), clients: map[uint64]netip.Addr{}}, err
}

func (r *relay) close() error { return r.rings.Close() }

// has reports whether there are rings with stamps.
func (r *relay) has() bool { return len(r.rings.Rings()) > 0 }

// read reads the stamps that have come. skew is the server's.
func (r *relay) read(skew func(ns uint64) uint64) error {
	take := func(s kernel.Stamp) { r.take(s, skew) }
	r.rings.Read(take)
	if time.Since(r.looked) < ringsWait {
		return nil
	}
	r.looked = time.Now()
	return r.rings.Review(take)
}

func (r *relay) take(s kernel.Stamp, skew func(ns uint64) uint64) {
	if skew != nil {
		s.Begin, s.End = skew(s.Begin), skew(s.End)
	}
	if !s.IsAnswer {
		if len(r.clients) >= clientsMax {
			clear(r.clients)
		}
		r.clients[s.Session] = s.Source
	}
	one := relayed{s.Session, r.clients[s.Session], stampEntry{s.Sequence, s.IsAnswer, stamp{s.Begin, s.End, s.Verdict, "", hook(s.AtTC)}}}
	if s.Reason != 0 {
		one.reason = s.Reason.String()
	}
	if one.to.IsValid() { // otherwise its probe was not seen, and its client is not known
		r.ready = append(r.ready, one)
	}
}

// tell sends all stamps that were read, in as few messages as possible, by send. It returns the number of stamps that
// were sent, and of messages that were not.
func (r *relay) tell(send func(message []byte, to netip.Addr) error) (told, notSent uint64) {
	slices.SortStableFunc(r.ready, func(a, b relayed) int { return cmp.Compare(a.session, b.session) })
	for ready := r.ready; len(ready) > 0; {
		message, count := append(r.message[:0], make([]byte, icmpBytes+headBytes)...), 0
		for _, one := range ready {
			if one.session != ready[0].session || len(message)+stampBytes+len(one.verdict)+len(one.reason) > reportBytes {
				break
			}
			message = one.append(message)
			count++
		}
		head{kind: byte(pingPingConstantPING_KIND_STAMPS), session: ready[0].session, sequence: uint64(count)}.put(message[icmpBytes:])
		if send(message, ready[0].to) != nil {
			notSent++
		} else {
			told += uint64(count)
		}
		ready, r.message = ready[count:], message
	}
	r.ready = r.ready[:0]
	return told, notSent
}
