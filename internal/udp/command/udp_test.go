package command

import (
	"bytes"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/test/golden"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// sampleLeases are one that is held, one that nobody holds, and one that cannot be leased.
func sampleLeases() []*shuntv1.UDPLease {
	return []*shuntv1.UDPLease{
		{Name: "feed", Interface: "eth0", Addresses: []string{"192.0.2.10:5000", "[2001:db8::10]:5000", "239.1.2.3:5000"}, Program: "native", Given: 3,
			Ended: map[string]uint64{"died": 1, "closed": 1}, LastEnd: "died",
			Holder: &shuntv1.UDPHolder{Pid: 4711, Uid: 990, Gid: 991, Cgroup: "/system.slice/feed.service", Since: timestamppb.New(time.Date(2026, 3, 1, 12, 0, 0, 0, time.Local)),
				Mode: "copy", Reason: "bind with zero-copy: operation not supported", RingSize: 64,
				Queues: []*shuntv1.UDPQueue{{Queue: 0, Free: 100, Cpu: proto.Uint32(2), Pinned: proto.Uint32(1), Oldest: durationpb.New(41_234 * time.Nanosecond), Claim: &shuntv1.UDPClaim{Stale: 7, TxShort: 8, Kicks: 9, Wakeups: 10}, Counts: &shuntv1.UDPCounts{Matched: 100, PassedNoSocket: 1, Delivered: 80, Waiting: 10, FillEmpty: 4, RingFull: 5}},
					{Queue: 3, Free: 128, Cpu: proto.Uint32(3), Pinned: proto.Uint32(0), Counts: &shuntv1.UDPCounts{Invalid: 1, TxInvalid: 2}}},
				Elsewhere: &shuntv1.UDPCounts{Matched: 20, PassedNoSocket: 17, DroppedNoSocket: 3}},
			OnNoSocket: "drop", Wait: "adaptive",
			Total:    &shuntv1.UDPCounts{Matched: 1120, PassedNoSocket: 18, DroppedNoSocket: 3, Delivered: 1080, Waiting: 10, FillEmpty: 4, RingFull: 5},
			Claimed:  &shuntv1.UDPClaim{Stale: 17, TxShort: 18, Kicks: 19, Wakeups: 20},
			BusyPoll: durationpb.New(200 * time.Microsecond), Interrupts: &shuntv1.UDPInterrupts{FlushTimeout: durationpb.New(200 * time.Microsecond), EmptyPolls: 2}},
		{Name: "idle", Interface: "eth0", BusyPoll: durationpb.New(200 * time.Microsecond), Interrupts: &shuntv1.UDPInterrupts{}, Addresses: []string{"192.0.2.10:5001"}, Program: "generic", Total: &shuntv1.UDPCounts{}},
		{Name: "shut", Interface: "eth0", Addresses: []string{"192.0.2.10:5003"}, Program: "native", OnNoSocket: "drop", Total: &shuntv1.UDPCounts{Matched: 9, DroppedNoSocket: 9}},
		{Name: "late", Interface: "eth9", Addresses: []string{"192.0.2.10:5002"}, Failed: "attach to interface eth9: Link not found",
			BusyPoll: durationpb.New(time.Millisecond), Interrupts: &shuntv1.UDPInterrupts{Failed: "read whether the interrupts of eth9 are off: Link not found"}, Total: &shuntv1.UDPCounts{}},
	}
}

func TestUDPOutput(t *testing.T) {
	var out bytes.Buffer
	printLeases(&out, sampleLeases())
	for _, l := range sampleLeases() {
		out.WriteString("\n")
		printLease(&out, l)
	}
	out.WriteString("\n")
	before := sampleLeases()[:2]
	before[0].Total = &shuntv1.UDPCounts{Matched: 120, PassedNoSocket: 1, Delivered: 1000, RingFull: 10} // RingFull has begun anew
	printRates(&out, time.Date(2026, 3, 1, 12, 0, 0, 0, time.Local), ratesOf(before, sampleLeases(), 2))
	printLeases(&out, nil)
	golden.Require(t, "testdata/udp.golden", out.String())
}

func TestUDPArguments(t *testing.T) {
	for _, args := range [][]string{{"udp", "show"}, {"udp", "show", "a", "b"}, {"udp", "list", "a"}, {"udp", "list", "-o", "yaml"},
		{"udp", "top", "--interval", "1ms"}, {"udp", "top", "--count", "-1"}} {
		var out, errOut bytes.Buffer
		if code := Main(args, nil, &out, &errOut); code != cli.ExitUsage {
			t.Errorf("%v ends with %d: %s", args, code, errOut.String())
		}
	}
}
