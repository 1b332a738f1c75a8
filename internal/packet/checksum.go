package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// ChecksumMode is the relation of a checksum field to the right value.
type ChecksumMode uint8

// The modes. They mean the same in Build (write this) and from Parse (this was there).
const (
	// Correct is the right checksum. A UDP checksum that computes to 0 is written as
	// 0xffff (RFC 768).
	Correct ChecksumMode = iota
	// Zero is a zero field: "none" for UDP over IPv4, wrong everywhere else.
	Zero
	// Partial is the sum that a sender leaves for its network card to complete
	// (CHECKSUM_PARTIAL in the kernel): the folded sum of the pseudo-header,
	// not inverted. TCP, UDP and ICMPv6 have one.
	Partial
	// Wrong is any other value.
	Wrong
)

// Checksum is one checksum field. The zero value is the right one.
type Checksum struct {
	Mode ChecksumMode
	// Value is the field itself where Mode is Wrong. Where Mode is Correct it is 0, or
	// 0xffff for the other way to write zero in one's complement, which receivers
	// accept and which incremental updates can leave (RFC 1624 section 3).
	Value uint16
}

// ChecksumValue is a field with the given value, even if it is wrong.
func ChecksumValue(value uint16) Checksum { return Checksum{Mode: Wrong, Value: value} }

// String is "correct", "zero", "partial" or "wrong 0x1234".
func (c Checksum) String() string {
	switch c.Mode {
	case Correct:
		return "correct"
	case Zero:
		return "zero"
	case Partial:
		return "partial"
	}
	return fmt.Sprintf("wrong 0x%04x", c.Value)
}

// field is the value of the field, given the right sum and the partial one.
func (c Checksum) field(right, partial uint16) uint16 {
	switch c.Mode {
	case Correct:
		if right == 0 && c.Value == 0xffff {
			return 0xffff
		}
		return right
	case Zero:
		return 0
	case Partial:
		return partial
	}
	return c.Value
}

// classify is the inverse of field. With partial 0 there is no partial form.
func classify(field, right, partial uint16) Checksum {
	switch {
	case field == right:
		return Checksum{}
	case field == 0xffff && right == 0:
		return Checksum{Value: 0xffff}
	case field == 0:
		return Checksum{Mode: Zero}
	case partial != 0 && field == partial:
		return Checksum{Mode: Partial}
	}
	return ChecksumValue(field)
}

// sum adds b to a one's complement sum, as big-endian words; an odd byte is the upper
// half of a word (RFC 1071).
func sum(b []byte, from uint64) uint64 {
	for len(b) >= 2 {
		from += uint64(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		from += uint64(b[0]) << 8
	}
	return from
}

func fold(s uint64) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

// pseudo is the sum of the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1). The
// destination is the IP header's, even if a routing header names another final one.
func pseudo(source, destination netip.Addr, protocol uint8, length int) uint64 {
	s := sum(source.AsSlice(), 0)
	s = sum(destination.AsSlice(), s)
	return s + uint64(protocol) + uint64(length>>16) + uint64(length&0xffff)
}

// checksums gives the right and the partial value of the field at offset in b.
// header is the pseudo-header's sum, 0 where there is none.
func checksums(b []byte, offset int, header uint64) (right, partial uint16) {
	s := sum(b[:offset], header)
	s = sum(b[offset+2:], s)
	return ^fold(s), fold(header)
}
