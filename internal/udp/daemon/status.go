package daemon

import (
	"context"
	"maps"
	"slices"
	"strconv"

	ptr "google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/metrics"
	"github.com/shunt-lb/shunt/internal/udp/broker"
	"github.com/shunt-lb/shunt/internal/udp/proto"
)

// Status implements node.Instance.
func (d *daemon) Status(_ context.Context, s *shuntv1.GetStatusResponse) error {
	st := d.broker.Status()
	for i := range st.Offers {
		m := leaseMessage(&st.Offers[i])
		if wanted := st.Offers[i].BusyPoll; wanted > 0 {
			m.BusyPoll, m.Interrupts = durationpb.New(wanted), d.interrupts(m.Interface)
		}
		s.Udp = append(s.Udp, m)
	}
	return nil
}

// interrupts returns an interface's values at this moment.
func (d *daemon) interrupts(iface string) *shuntv1.UDPInterrupts {
	quiet, polls, err := d.tuner.Now(iface)
	if err != nil {
		return &shuntv1.UDPInterrupts{Failed: err.Error()}
	}
	return &shuntv1.UDPInterrupts{FlushTimeout: durationpb.New(quiet), EmptyPolls: polls}
}

// totals returns the sums of an offer's leases, including the present one.
func totals(o *broker.OfferStatus) broker.Totals {
	t := o.Past
	if o.Lease != nil {
		t.Add(o.Lease.Totals())
	}
	return t
}

func leaseMessage(o *broker.OfferStatus) *shuntv1.UDPLease {
	m := &shuntv1.UDPLease{Name: o.Name, Interface: o.Interface, Program: string(o.Program), Failed: o.Failed,
		Given: o.Given, Ended: o.Ended, LastEnd: o.LastEnd, Total: totalsMessage(totals(o)), Claimed: claimMessage(o.Claimed),
		OnNoSocket: "pass", Wait: string(o.Wait), Resumed: o.Resumed, Awaited: o.Awaited != nil}
	if o.Drop {
		m.OnNoSocket = "drop"
	}
	for _, a := range o.Addresses {
		m.Addresses = append(m.Addresses, a.String())
	}
	l := o.Lease
	if l == nil {
		return m
	}
	m.Holder = &shuntv1.UDPHolder{Pid: int32(l.Holder.PID), Uid: l.Holder.UID, Gid: l.Holder.GID, Cgroup: l.Holder.Cgroup, Since: timestamppb.New(l.Since),
		Mode: string(l.Mode), Reason: l.Reason, RingSize: l.RingSize,
		Elsewhere: totalsMessage(broker.Totals{Count: l.Elsewhere})}
	for i, q := range l.Queues {
		one := &shuntv1.UDPQueue{Queue: uint32(q.Queue), Counts: totalsMessage(broker.TotalsOf(q)), Free: q.Free}
		if cpu, named := proto.CPUOf(l.CPUs, i); named {
			one.Cpu = ptr.Uint32(uint32(cpu))
			if l.Pinned != nil {
				one.Pinned = ptr.Uint32(uint32(l.Pinned[cpu]))
			}
		}
		if q.Oldest > 0 {
			one.Oldest = durationpb.New(q.Oldest)
		}
		if l.Claims != nil {
			one.Claim = claimMessage(&l.Claims[i])
		}
		m.Holder.Queues = append(m.Holder.Queues, one)
	}
	return m
}

func totalsMessage(t broker.Totals) *shuntv1.UDPCounts {
	return &shuntv1.UDPCounts{Matched: t.Matched, PassedNoSocket: t.PassedNoSocket, DroppedNoSocket: t.DroppedNoSocket, Delivered: t.Taken, Waiting: t.Waiting, FillEmpty: t.Dropped,
		RingFull: t.RingFull, Invalid: t.Invalid, TxInvalid: t.TxInvalid}
}

// claimMessage returns nil if nothing is claimed.
func claimMessage(c *proto.Claim) *shuntv1.UDPClaim {
	if c == nil {
		return nil
	}
	return &shuntv1.UDPClaim{Stale: c.Stale, TxShort: c.TxShort, Kicks: c.Kicks, Wakeups: c.Wakeups}
}

// Sample implements node.Sampler.
func (d *daemon) Sample(s *metrics.Sample) error {
	st := d.broker.Status()
	s.Lends = true
	for i := range st.Offers {
		o := &st.Offers[i]
		t := totals(o)
		one := metrics.Lease{Name: o.Name, Given: o.Given, Resumed: o.Resumed, Matched: t.Matched, Delivered: t.Taken, Passed: t.PassedNoSocket, NoSocket: t.DroppedNoSocket,
			FillEmpty: t.Dropped, RingFull: t.RingFull, Invalid: t.Invalid, TxInvalid: t.TxInvalid, Held: o.Lease != nil || o.Awaited != nil, Claims: (*metrics.LeaseClaims)(o.Claimed)}
		one.Ended, one.Counts = sorted(o.Ended), queueCounts(o)
		if o.Lease != nil {
			for _, q := range o.Lease.Queues {
				one.Queues = append(one.Queues, metrics.LeaseQueue{Queue: strconv.Itoa(q.Queue), Waiting: uint64(q.Waiting), Room: uint64(o.Lease.RingSize), Free: uint64(q.Free)})
			}
		}
		s.Leases = append(s.Leases, one)
	}
	s.LeasesRefused = sorted(st.Refused)
	return nil
}

// queueCounts returns the counts of each queue that a lease has had. Like the lease's counts, they never shrink.
func queueCounts(o *broker.OfferStatus) (all []metrics.QueueCounts) {
	sums := maps.Clone(o.PastQueues)
	if sums == nil {
		sums = map[int]broker.Totals{}
	}
	if o.Lease != nil {
		for _, q := range o.Lease.Queues {
			t := sums[q.Queue]
			t.Add(broker.TotalsOf(q))
			sums[q.Queue] = t
		}
	}
	for _, queue := range slices.Sorted(maps.Keys(sums)) {
		t := sums[queue]
		all = append(all, metrics.QueueCounts{Queue: strconv.Itoa(queue), Matched: t.Matched, Delivered: t.Taken, Passed: t.PassedNoSocket,
			FillEmpty: t.Dropped, RingFull: t.RingFull, NoSocket: t.DroppedNoSocket})
	}
	return all
}

func sorted(all map[string]uint64) (counts []metrics.Count) {
	for _, why := range slices.Sorted(maps.Keys(all)) {
		counts = append(counts, metrics.Count{Of: why, Count: all[why]})
	}
	return counts
}
