package main

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/packet"
)

// lengthClass is a share of the new flows, and their average length. Lengths within a class are
// exponentially distributed.
type lengthClass struct {
	share float64
	mean  time.Duration
}

// lengths is the mixture of the flows' lengths, made for this measurement: a long tail is the hard
// case here, and two thirds of the flows alive at a moment are of the last class.
var lengths = []lengthClass{{0.90, 10 * time.Second}, {0.09, 5 * time.Minute}, {0.01, 2 * time.Hour}}

// When flows send.
const (
	gapMin     = 10 * time.Second // between two packets of a flow, uniformly up to …
	gapMax     = 30 * time.Second
	idleShare  = 0.02 // of the flows have long gaps instead, uniformly up to …
	idleGapMax = 10 * time.Minute
)

// meanLength is the average of all new flows.
func meanLength() time.Duration {
	var mean float64
	for _, c := range lengths {
		mean += c.share * float64(c.mean)
	}
	return time.Duration(mean)
}

// clientID is a client's address and port, in wire order.
type clientID uint64

func newClientID(address, port []byte) clientID {
	return clientID(binary.BigEndian.Uint32(address))<<16 | clientID(binary.BigEndian.Uint16(port))
}

func (c clientID) String() string {
	var address [4]byte
	binary.BigEndian.PutUint32(address[:], uint32(c>>16))
	return netip.AddrPortFrom(netip.AddrFrom4(address), uint16(c)).String()
}

// clientNumber is the n-th client: none comes twice in a run.
func clientNumber(n uint64) clientID {
	const bits = 17 // 198.18.0.0/15 is for benchmarks (RFC 2544)
	address := uint64(198<<24|18<<16) + n&(1<<bits-1)
	return clientID(address<<16 | (1024 + n>>bits))
}

// flow is a TCP connection, as its client sees it. Times are simulated, from the start.
type flow struct {
	client  clientID
	class   int
	idle    bool
	next    time.Duration // packet
	last    time.Duration // packet
	end     time.Duration
	backend uint32 // outer destination of its first packet
}

// crowd makes flows: their number, lengths and times, all from one seed.
type crowd struct {
	random  *rand.Rand
	made    uint64
	arrival time.Duration // of the next new flow
	between time.Duration // two arrivals, on average
}

func newCrowd(seed uint64, flows int) *crowd {
	c := &crowd{random: rand.New(rand.NewPCG(seed, 0)), between: meanLength() / time.Duration(flows)}
	c.arrival = c.exponential(c.between)
	return c
}

func (c *crowd) exponential(mean time.Duration) time.Duration {
	return time.Duration(c.random.ExpFloat64() * float64(mean))
}

// draw chooses a class by weight.
func (c *crowd) draw(weight func(lengthClass) float64) int {
	total := 0.0
	for _, l := range lengths {
		total += weight(l)
	}
	at := c.random.Float64() * total
	for i, l := range lengths {
		if at -= weight(l); at < 0 {
			return i
		}
	}
	return len(lengths) - 1
}

// newborn is a new flow's class.
func (c *crowd) newborn() int { return c.draw(func(l lengthClass) float64 { return l.share }) }

// present is the class of one of the flows alive at a moment: the longer, the more likely.
// The rest of an exponential length is distributed like the whole.
func (c *crowd) present() int {
	return c.draw(func(l lengthClass) float64 { return l.share * float64(l.mean) })
}

// begin is a flow of this class that begins now.
func (c *crowd) begin(class int, now time.Duration) *flow {
	f := &flow{client: clientNumber(c.made), class: class, next: now, last: now,
		end: now + c.exponential(lengths[class].mean), idle: c.random.Float64() < idleShare}
	c.made++
	return f
}

// gap is the time until the flow's next packet.
func (c *crowd) gap(f *flow) time.Duration {
	if f.idle {
		return time.Duration(c.random.Float64() * float64(idleGapMax))
	}
	return gapMin + time.Duration(c.random.Float64()*float64(gapMax-gapMin))
}

// Offsets in an Ethernet frame with IPv4 without options and TCP.
const (
	offsetIPChecksum  = 14 + 10
	offsetSource      = 14 + 12
	offsetPort        = 14 + 20
	offsetTCPChecksum = 14 + 20 + 16
	offsetProtocol    = 14 + 9
	offsetDestination = 14 + 16
)

// frame is a packet whose client is filled in later.
type frame []byte

// newFrame is a packet from 0.0.0.0:0.
func newFrame(flags string, edits ...packet.Edit) frame {
	nobody := netip.AddrPortFrom(netip.AddrFrom4([4]byte{}), 0)
	return packet.Must(packet.NewTCP(nobody, service, flags, append(edits, packet.MACs(otherMAC, ownMAC))...))
}

// from makes the packet one of this client's. The checksums follow (RFC 1624, eqn. 3).
func (f frame) from(client clientID, room []byte) []byte {
	b := room[:copy(room, f)]
	binary.BigEndian.PutUint32(b[offsetSource:], uint32(client>>16))
	binary.BigEndian.PutUint16(b[offsetPort:], uint16(client))
	address := uint32(client>>32)&0xffff + uint32(client>>16)&0xffff
	addTo(b[offsetIPChecksum:], address)
	addTo(b[offsetTCPChecksum:], address+uint32(client)&0xffff)
	return b
}

func addTo(checksum []byte, words uint32) {
	sum := uint32(^binary.BigEndian.Uint16(checksum)) + words
	sum = sum>>16 + sum&0xffff
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(checksum, ^uint16(sum))
}

// outerDestination reads the backend off a frame that left: IPIP has protocol number 4.
func outerDestination(b []byte) (uint32, error) {
	if len(b) < 14+20+20 || b[12] != 0x08 || b[13] != 0 || b[offsetProtocol] != 4 {
		return 0, fmt.Errorf("the frame that left is no IPv4 packet with another inside: % x", b[:min(len(b), 64)])
	}
	return binary.BigEndian.Uint32(b[offsetDestination:]), nil
}
