package ping

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"
)

// Place is a place that a probe or its answer passed, in any network namespace of a host.
type Place struct {
	Host      string `json:"host"`    // client or server
	UserID    uint16 `json:"user_id"` // that host's --userid; 0: none
	Netns     uint32 `json:"netns"`   // inode number, as in /proc/PID/ns/net
	Interface uint32 `json:"ifindex"` // of the device there; 0: none
	Direction string `json:"direction"`
	Point     string `json:"point"`            // queue, driver, receive, softirq or dropped
	Ns        int64  `json:"ns"`               // on the client's clock, since the probe was sent
	Reason    string `json:"reason,omitempty"` // of a drop: enum skb_drop_reason of that host's kernel
}

// The hosts of a probe, and the directions in which it passes places.
const (
	clientHost, serverHost, balancerHost = "client", "server", "balancer"
	request, answer                      = "request", "answer"
)

// placePoints are the names of a place's points, by enum ping_point.
var placePoints = [...]string{"queue", "driver", "receive", "softirq", "socket", "dropped"}

// place is a place on a host's own clock, with the reason's name.
type place struct {
	at        uint64 // ns; CLOCK_MONOTONIC
	netns     uint32
	ifindex   uint32
	point     byte // enum ping_point; PING_POINT_COUNT: dropped
	isRequest bool
	reason    string
}

// trail returns a copy of the places of a probe, in their order; nil: none is noted, or newer probes took the room.
func (r *recorder) trail(session, sequence uint64) []place {
	if !r.everywhere {
		return nil
	}
	position := position(session, sequence, trailCount)
	t := (*pingPingTrail)(unsafe.Pointer(&r.memory[trailMemory][position*uint64(unsafe.Sizeof(pingPingTrail{}))]))
	same := func() bool {
		return atomic.LoadUint64(&t.Session) == session && atomic.LoadUint64(&t.Sequence) == sequence
	}
	if !same() {
		return nil
	}
	var all []place
	for i := range min(atomic.LoadUint64(&t.Count), uint64(len(t.Places))) {
		p := &t.Places[i]
		at := atomic.LoadUint64(&p.AtNs)
		if at == 0 || int(p.Point) >= len(placePoints) { // it is being written
			continue
		}
		one := place{at: at, netns: p.Netns, ifindex: p.Ifindex, point: p.Point, isRequest: p.IsRequest != 0}
		if p.Point == byte(pingPingPointPING_POINT_COUNT) {
			one.reason = r.reason(p.DropReason)
		}
		all = append(all, one)
	}
	if !same() { // a newer probe took it meanwhile
		return nil
	}
	return all
}

const (
	trailBytes = 3  // of a message with a trail, before the places: the user's id, and the number of places
	placeBytes = 19 // of a place, without its reason
)

// appendTrail adds a server's user id and places to a message, as many as a report may have bytes.
func appendTrail(b []byte, userID uint16, places []place) []byte {
	b = binary.BigEndian.AppendUint16(b, userID)
	count := len(b)
	b = append(b, 0)
	for _, p := range places {
		reason := p.reason[:min(len(p.reason), reasonBytes)]
		if len(b)+placeBytes+len(reason) > reportBytes || b[count] == 255 {
			break
		}
		b[count]++
		b = binary.BigEndian.AppendUint64(b, p.at)
		b = binary.BigEndian.AppendUint32(b, p.netns)
		b = binary.BigEndian.AppendUint32(b, p.ifindex)
		direction := byte(0)
		if p.isRequest {
			direction = 1
		}
		b = append(append(b, p.point, direction, byte(len(reason))), reason...)
	}
	return b
}

// parseTrail reads the text of appendTrail, and accepts nothing else.
func parseTrail(b []byte) (userID uint16, all []place, err error) {
	if len(b) < trailBytes {
		return 0, nil, fmt.Errorf("decode the places of a probe: %d bytes are fewer than %d", len(b), trailBytes)
	}
	userID = binary.BigEndian.Uint16(b)
	count := int(b[2])
	for b = b[trailBytes:]; len(all) < count; {
		if len(b) < placeBytes || len(b) < placeBytes+int(b[placeBytes-1]) {
			return 0, nil, fmt.Errorf("decode %d places of a probe: the message ends after %d", count, len(all))
		}
		if int(b[16]) >= len(placePoints) || b[17] > 1 {
			return 0, nil, fmt.Errorf("decode the places of a probe: there is no point %d in direction %d", b[16], b[17])
		}
		end := placeBytes + int(b[placeBytes-1])
		all = append(all, place{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:]), b[16], b[17] == 1, printable(b[placeBytes:end])})
		b = b[end:]
	}
	if len(b) > 0 {
		return 0, nil, fmt.Errorf("decode %d places of a probe: %d bytes are left", count, len(b))
	}
	return userID, all, nil
}

// public returns the place as it is reported, at a time.
func (p place) public(host string, userID uint16, ns int64) Place {
	v := Place{Host: host, UserID: userID, Netns: p.netns, Interface: p.ifindex, Direction: answer, Point: placePoints[p.point], Ns: ns, Reason: p.reason}
	if p.isRequest {
		v.Direction = request
	}
	return v
}

// places returns the places of both hosts in the order of their times; here converts the server's clock to the client's, nil: that is
// not possible, and the server's places are left out. At the end of its path the kernel also drops delivered packets, so
// only drops of lost probes are shown.
func (p *pending) places(userID uint16, here func(ns int64) int64) []Place {
	var all []Place
	add := func(host string, userID uint16, trail []place, here func(ns int64) int64) {
		for _, one := range trail {
			if p.user == 0 || one.point != byte(pingPingPointPING_POINT_COUNT) {
				all = append(all, one.public(host, userID, here(int64(one.at))-int64(p.sent)))
			}
		}
	}
	add(clientHost, userID, p.ourTrail, func(ns int64) int64 { return ns })
	if here != nil {
		add(serverHost, p.theirID, p.theirTrail, here)
	}
	slices.SortStableFunc(all, func(a, b Place) int { return cmp.Compare(a.Ns, b.Ns) })
	return all
}

// String returns the place as one line, without its time.
func (p Place) String() string {
	host := p.Host
	if p.UserID != 0 {
		host = fmt.Sprintf("%s %d", host, p.UserID)
	}
	text := fmt.Sprintf("%s, netns %d, interface %d: %s, %s", host, p.Netns, p.Interface, p.Direction, p.Point)
	if p.Reason != "" {
		text += ": " + p.Reason
	}
	return text
}
