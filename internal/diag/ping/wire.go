package ping

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Sizes in bytes.
const (
	icmpBytes   = 8  // the header of an echo message, RFC 792 and RFC 4443; as large as that of UDP, RFC 768
	headBytes   = 24 // struct probe_head
	entryBytes  = 73 // of a report, without the reason
	reasonBytes = 64 // the longest reason
	reportBytes = 1200
)

// head is struct probe_head. The session is in the order in which it was written by this code.
type head struct {
	kind              byte
	isAnswer          bool // of UDP
	session, sequence uint64
}

var errNotOurs = errors.New("it is no message of shunt")

func (h head) put(b []byte) {
	clear(b[:headBytes])
	binary.BigEndian.PutUint32(b, uint32(pingProbeConstantPROBE_MAGIC))
	b[4], b[5], b[6] = byte(pingProbeConstantPROBE_VERSION), h.kind, byte(number(h.isAnswer))
	binary.NativeEndian.PutUint64(b[8:], h.session)
	binary.BigEndian.PutUint64(b[16:], h.sequence)
}

func parseHead(b []byte) (head, error) {
	if len(b) < headBytes || binary.BigEndian.Uint32(b) != uint32(pingProbeConstantPROBE_MAGIC) || b[4] != byte(pingProbeConstantPROBE_VERSION) {
		return head{}, errNotOurs
	}
	return head{b[5], b[6] != 0, binary.NativeEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:])}, nil
}

// seen has a server's times of a probe: ns of its own CLOCK_MONOTONIC, 0 if not known.
type seen struct {
	sequence                        uint64
	receive, softirq, queue, driver uint64 // of the probe, and of the kernel's answer
	socket, woken, user             uint64 // of the process, which only listens
	dropped                         uint64
	reason                          string // of a drop
}

// append adds the entry to a report: nine numbers in network order, the length of the reason, the reason.
func (s seen) append(b []byte) []byte {
	for _, n := range []uint64{s.sequence, s.receive, s.softirq, s.queue, s.driver, s.socket, s.woken, s.user, s.dropped} {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	reason := s.reason[:min(len(s.reason), reasonBytes)]
	return append(append(b, byte(len(reason))), reason...)
}

// parseReport reads the entries of a report, which must have exactly this number.
func parseReport(b []byte, count uint64) ([]seen, error) {
	var all []seen
	if most := min(count, uint64(len(b)/entryBytes)); most > 0 {
		all = make([]seen, 0, most)
	}
	for uint64(len(all)) < count {
		if len(b) < entryBytes || len(b) < entryBytes+int(b[entryBytes-1]) {
			return nil, fmt.Errorf("decode a report of %d probes: it ends after %d", count, len(all))
		}
		var s seen
		for i, n := range []*uint64{&s.sequence, &s.receive, &s.softirq, &s.queue, &s.driver, &s.socket, &s.woken, &s.user, &s.dropped} {
			*n = binary.BigEndian.Uint64(b[8*i:])
		}
		end := entryBytes + int(b[entryBytes-1])
		s.reason = printable(b[entryBytes:end])
		all, b = append(all, s), b[end:]
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("decode a report of %d probes: %d bytes are left", count, len(b))
	}
	return all, nil
}

// printable removes characters of another host's message that would control the terminal.
func printable(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	clean := make([]byte, len(b))
	for i, c := range b {
		if clean[i] = c; c < ' ' || c > '~' {
			clean[i] = '?'
		}
	}
	return string(clean)
}
