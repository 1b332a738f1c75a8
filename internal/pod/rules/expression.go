package rules

import (
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// reads are expressions that only look at a packet; their results are not followed here.
var reads = []string{"range", "fib", "rt", "socket", "osf", "hash", "numgen", "xfrm", "tunnel", "byteorder", "inner"}

// silent are expressions that change nothing but counters.
var silent = []string{"counter", "last"}

// expression judges an expression other than a verdict. what names its possible effect on the packets, which reach it
// as match says.
func (j *judge) expression(e *expression, match answer) (a answer, what string) {
	switch e.name {
	case "meta":
		return j.metaExpression(e, match)
	case "payload":
		return j.payloadExpression(e)
	case "ct":
		return j.ctExpression(e)
	case "cmp":
		return j.cmpExpression(e)
	case "bitwise":
		j.bitwise(e)
		return yes, ""
	case "immediate":
		return j.immediate(e)
	case "lookup":
		if to, ok := e.number(unix.NFTA_LOOKUP_DREG); ok {
			if to == unix.NFT_REG_VERDICT {
				return no, "it has a verdict map, which shunt does not judge"
			}
			j.registers[to] = nil
		}
		return maybe, ""
	case "exthdr":
		if _, writes := e.number(unix.NFTA_EXTHDR_SREG); writes {
			return no, "it changes a header"
		}
		return j.unknown(e, unix.NFTA_EXTHDR_DREG)
	case "match":
		return j.xtMatch(e), ""
	case "target":
		return j.xtTarget(e)
	}
	if slices.Contains(silent, e.name) {
		return yes, ""
	}
	if slices.Contains(reads, e.name) {
		clear(j.registers) // the values that each puts into registers are not followed
		return maybe, ""
	}
	return no, fmt.Sprintf("%q, which is not judged", e.name)
}

// unknown judges an expression that puts an unknown value into a register.
func (j *judge) unknown(e *expression, register uint16) (answer, string) {
	if to, ok := e.number(register); ok {
		j.registers[to] = nil
	}
	return maybe, ""
}

func (j *judge) metaExpression(e *expression, match answer) (answer, string) {
	key, _ := e.number(unix.NFTA_META_KEY)
	if from, sets := e.number(unix.NFTA_META_SREG); sets {
		if key != unix.NFT_META_MARK {
			return no, "it sets meta data of the packet"
		}
		values := j.registers[from]
		if match != yes || j.doubt {
			values = nil
		}
		j.mark = values
		return yes, ""
	}
	if to, ok := e.number(unix.NFTA_META_DREG); ok {
		j.registers[to] = j.meta(key)
	}
	return yes, ""
}

func (j *judge) payloadExpression(e *expression) (answer, string) {
	if _, writes := e.number(unix.NFTA_PAYLOAD_SREG); writes {
		return no, "it changes the packet"
	}
	base, _ := e.number(unix.NFTA_PAYLOAD_BASE)
	offset, _ := e.number(unix.NFTA_PAYLOAD_OFFSET)
	size, _ := e.number(unix.NFTA_PAYLOAD_LEN)
	if to, ok := e.number(unix.NFTA_PAYLOAD_DREG); ok {
		j.registers[to] = j.payload(base, offset, size)
	}
	return yes, ""
}

func (j *judge) ctExpression(e *expression) (answer, string) {
	if _, sets := e.number(unix.NFTA_CT_SREG); sets {
		return no, "it changes the connection's entry"
	}
	key, _ := e.number(unix.NFTA_CT_KEY)
	if to, ok := e.number(unix.NFTA_CT_DREG); ok {
		j.registers[to] = nil
		if key == unix.NFT_CT_STATE {
			j.registers[to] = j.states()
		}
	}
	return yes, ""
}

func (j *judge) cmpExpression(e *expression) (answer, string) {
	from, _ := e.number(unix.NFTA_CMP_SREG)
	op, _ := e.number(unix.NFTA_CMP_OP)
	return compare(j.registers[from], op, dataOf(e, unix.NFTA_CMP_DATA)), ""
}

// dataOf returns the value in a nested attribute.
func dataOf(e *expression, attribute uint16) []byte {
	nested, err := parse(e.attributes[attribute])
	if err != nil {
		return nil
	}
	return nested[unix.NFTA_DATA_VALUE]
}

func (j *judge) immediate(e *expression) (answer, string) {
	if to, ok := e.number(unix.NFTA_IMMEDIATE_DREG); ok {
		j.registers[to] = nil
		if value := dataOf(e, unix.NFTA_IMMEDIATE_DATA); value != nil {
			j.registers[to] = one(value)
		}
	}
	return yes, ""
}

// bitwise computes nft's (value & mask) ^ xor; its shifts are not followed.
func (j *judge) bitwise(e *expression) {
	from, _ := e.number(unix.NFTA_BITWISE_SREG)
	to, _ := e.number(unix.NFTA_BITWISE_DREG)
	const operation = 6 // NFTA_BITWISE_OP
	op, _ := e.number(operation)
	mask, xor := dataOf(e, unix.NFTA_BITWISE_MASK), dataOf(e, unix.NFTA_BITWISE_XOR)
	values := j.registers[from]
	j.registers[to] = nil
	if op != 0 || len(mask) == 0 || len(mask) != len(xor) {
		return
	}
	var all [][]byte
	for _, v := range values {
		if len(v) < len(mask) {
			return
		}
		result := make([]byte, len(mask))
		for i := range mask {
			result[i] = v[i]&mask[i] ^ xor[i]
		}
		all = append(all, result)
	}
	j.registers[to] = all
}

// xtMatch judges a match extension of iptables.
func (j *judge) xtMatch(e *expression) answer {
	info := e.attributes[unix.NFTA_MATCH_INFO]
	revision, _ := e.number(unix.NFTA_MATCH_REV)
	switch text(e.attributes[unix.NFTA_MATCH_NAME]) {
	case "comment":
		return yes
	case "conntrack":
		if revision >= 2 {
			return j.xtConntrack(info)
		}
	case "mark": // struct xt_mark_mtinfo1: mark, mask, invert
		if revision == 1 && len(info) >= 9 && len(j.mark) == 1 && len(j.mark[0]) == 4 {
			mark, mask := binary.NativeEndian.Uint32(info), binary.NativeEndian.Uint32(info[4:])
			if (binary.NativeEndian.Uint32(j.mark[0])&mask == mark) != (info[8] != 0) {
				return yes
			}
			return no
		}
	}
	return maybe
}

// xtConntrack reads struct xt_conntrack_mtinfo2 and 3 of linux/netfilter/xt_conntrack.h, if they ask only for
// the state.
func (j *judge) xtConntrack(info []byte) answer {
	const flagsAt, invertAt, statesAt, onlyState = 146, 148, 150, 1
	if len(info) < statesAt+2 || binary.NativeEndian.Uint16(info[flagsAt:]) != onlyState {
		return maybe
	}
	wanted, inverted := uint32(binary.NativeEndian.Uint16(info[statesAt:])), binary.NativeEndian.Uint16(info[invertAt:])&onlyState != 0
	values, count := j.states(), 0
	if len(values) == 0 {
		return maybe
	}
	for _, v := range values {
		if (binary.NativeEndian.Uint32(v)&wanted != 0) != inverted {
			count++
		}
	}
	return among(count, len(values))
}

// xtTarget judges a target of iptables for which nf_tables has no verdict.
func (j *judge) xtTarget(e *expression) (answer, string) {
	switch name := text(e.attributes[unix.NFTA_TARGET_NAME]); {
	case name == "MARK":
		j.mark = nil
		return yes, ""
	case name == "TCPMSS" && j.packets.Established: // it changes only SYNs (xt_TCPMSS), which the host still forwards
		return yes, ""
	default:
		return no, "the target " + name
	}
}
