package hook

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/packet"
)

// The addresses and ports that random packets are for, or for one beside them.
var leasedAt = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.10:5000"), netip.MustParseAddrPort("[2001:db8::10]:5000")}

// Random and damaged packets get from the program the verdict, and the count, that a model in Go has for them; and no byte of them
// changes.
func TestRandomPackets(t *testing.T) {
	inHost(t, func(t *testing.T) {
		h, lease := open(t, leasedAt[0].String(), leasedAt[1].String())
		own := macOf(t)
		seeds := randomSeeds(own)
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 1))
		rounds := 20000
		if testing.Short() {
			rounds = 2000
		}
		found := map[string]int{}
		before, err := h.Passed()
		must(t, err)
		for range rounds {
			frame := damaged(random, seeds[random.IntN(len(seeds))])
			matched, passed := modelled(frame, own)
			found[passed]++
			want := uint32(kernel.XDPPass)
			if matched {
				want = kernel.XDPRedirect
				found["matched"]++
			}
			verdict, out, err := h.RunPacket(frame)
			must(t, err)
			after, err := h.Passed()
			must(t, err)
			if passed != "" {
				before[passed]++
			}
			for name := range after {
				if after[name] != before[name] {
					t.Errorf("%x: its count as %q is %+d off; the model counts it as %q", frame, name, int64(after[name]-before[name]), passed)
					return
				}
			}
			if verdict != want || !bytes.Equal(out, frame) {
				t.Errorf("%x: verdict %d and %x, want %d", frame, verdict, out, want)
				return
			}
		}
		if count, err := h.Counts(lease, 0); err != nil || count != (Count{Matched: uint64(found["matched"])}) {
			t.Errorf("counted is %+v, %v; the model says %v", count, err, found)
		}
		for _, name := range []string{"matched", "", "malformed", "options", "fragment"} {
			if found[name] < rounds/100 {
				t.Errorf("of %d packets %d are %q: they no longer try everything: %v", rounds, found[name], name, found)
			}
		}
	})
}

// randomSeeds are the packets that random ones are made from.
func randomSeeds(own []byte) (all [][]byte) {
	mac := packet.MACs([]byte{2, 9, 9, 9, 9, 9}, own)
	for i, from := range []string{"198.51.100.7:40000", "[2001:db8:c::7]:40000"} {
		to := leasedAt[i].String()
		plain := packet.Must(packet.NewUDP(from, to, packet.Data("hello"), mac))
		all = append(all, plain, plain, packet.Must(packet.NewTCP(from, to, "S", mac)))
	}
	all = append(all, packet.Must(packet.NewUDP("198.51.100.7:40000", leasedAt[0].String(), packet.Data("hello"), mac, packet.IPv4Options(1, 1, 1, 0))))
	for _, kind := range []uint8{0, 43, 44, 51, 60} { // extension headers
		all = append(all, packet.Must(packet.NewUDP("[2001:db8:c::7]:40000", leasedAt[1].String(), packet.Data("hello"), mac, func(p *packet.Packet) {
			p.IPv6.Extensions = []packet.Extension{{Type: kind, Body: []byte{0, 0, 0, 0, 0, 0}}}
		})))
	}
	return all
}

// damaged changes up to two octets of the headers, mostly by little, and sometimes the length of the frame.
func damaged(random *rand.Rand, frame []byte) []byte {
	frame = slices.Clone(frame)
	for range random.IntN(3) {
		at := random.IntN(min(len(frame), 70))
		switch random.IntN(3) {
		case 0:
			frame[at] = byte(random.Uint32())
		case 1:
			frame[at] ^= 1 << random.IntN(8)
		case 2:
			frame[at] += byte(random.IntN(5) - 2)
		}
	}
	switch random.IntN(8) {
	case 0, 1:
		frame = frame[:14+random.IntN(len(frame)-13)]
	case 2:
		frame = append(frame, make([]byte, random.IntN(40))...)
	}
	return frame
}

// modelled reports whether the socket has a frame, and otherwise the counter of passed packets that has it; "": none.
func modelled(frame, own []byte) (matched bool, passed string) {
	if !bytes.Equal(frame[:6], own) && frame[0]&1 == 0 {
		return false, "" // for another station
	}
	switch ip := frame[14:]; binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		return modelled4(ip)
	case 0x86dd:
		return modelled6(ip)
	}
	return false, ""
}

func modelled4(ip []byte) (matched bool, passed string) {
	if len(ip) < 20 {
		return false, "malformed"
	}
	size, header, fragmented, protocol := int(binary.BigEndian.Uint16(ip[2:])), int(ip[0]&15)*4, binary.BigEndian.Uint16(ip[6:])&0x3fff != 0, ip[9]
	destination := netip.AddrFrom4([4]byte(ip[16:]))
	if ip[0] == 0x45 && !fragmented && isOther(ip[20:], protocol, destination) {
		return false, ""
	}
	switch {
	case ip[0]>>4 != 4 || header < 20 || size < header || size > len(ip):
		return false, "malformed"
	case fragmented:
		return false, "fragment"
	case protocol != 17:
		return false, ""
	case header > 20:
		return false, "options"
	}
	return modelledUDP(ip[20:size], destination)
}

func modelled6(ip []byte) (matched bool, passed string) {
	if len(ip) < 40 {
		return false, "malformed"
	}
	size, protocol, source, destination := 40+int(binary.BigEndian.Uint16(ip[4:])), ip[6], netip.AddrFrom16([16]byte(ip[8:])), netip.AddrFrom16([16]byte(ip[24:]))
	switch {
	case isOther(ip[40:], protocol, destination):
		return false, ""
	case ip[0]>>4 != 6 || size > len(ip):
		return false, "malformed"
	case source.Is4In6() || destination.Is4In6():
		return false, ""
	case protocol == 17:
		return modelledUDP(ip[40:size], destination)
	}
	for rest := ip[40:size]; ; {
		var length int
		switch protocol {
		case 44:
			return false, "fragment"
		case 17:
			return false, "options"
		case 0, 43, 60:
			if len(rest) >= 8 {
				length = (int(rest[1]) + 1) * 8
			}
		case 51:
			if len(rest) >= 8 {
				length = (int(rest[1]) + 2) * 4
			}
		default:
			return false, ""
		}
		if length == 0 {
			return false, "malformed"
		}
		if protocol == 43 && rest[3] != 0 {
			return false, "" // not at its last destination yet
		}
		if length > len(rest) {
			return false, "malformed"
		}
		protocol, rest = rest[0], rest[length:]
	}
}

// isOther reports whether the program stops at a packet early: TCP, or a datagram to an address and port whose hash no
// lease has.
func isOther(l4 []byte, protocol uint8, to netip.Addr) bool {
	if protocol != 17 || len(l4) < 8 {
		return protocol == 6
	}
	of := hash(netip.AddrPortFrom(to, binary.BigEndian.Uint16(l4[2:])))
	return !slices.ContainsFunc(leasedAt, func(leased netip.AddrPort) bool { return hash(leased) == of })
}

// modelledUDP models a datagram, as long as its IP header says.
func modelledUDP(udp []byte, to netip.Addr) (matched bool, passed string) {
	if len(udp) < 8 {
		return false, "malformed"
	}
	if size := int(binary.BigEndian.Uint16(udp[4:])); size < 8 || size > len(udp) {
		return false, "malformed"
	}
	return slices.Contains(leasedAt, netip.AddrPortFrom(to, binary.BigEndian.Uint16(udp[2:]))), ""
}
