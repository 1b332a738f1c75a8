package metrics

// udpFamilies are present while the UDP path runs.
var udpFamilies = []Family{
	{"shunt_udp_lease_held", Gauge, []string{"lease"}, "1 if a program has the lease, else 0: the kernel's socket gets the datagrams, or they are dropped (on_no_socket).",
		leases(func(e *exposition, labels string, l *Lease) { e.whole(labels, flag(l.Held)) })},
	{"shunt_udp_leases_given_total", Counter, []string{"lease"}, "Leases that programs were given.",
		leases(func(e *exposition, labels string, l *Lease) { e.whole(labels, l.Given) })},
	{"shunt_udp_leases_resumed_total", Counter, []string{"lease"}, "Leases of shunt_udp_leases_given_total that an earlier daemon had lent, and this daemon took over.",
		leases(func(e *exposition, labels string, l *Lease) { e.whole(labels, l.Resumed) })},
	{"shunt_udp_leases_ended_total", Counter, []string{"lease", "reason"}, "Leases that are over, by reason: closed, died, expired, revoked, tampered and others.",
		leases(func(e *exposition, of string, l *Lease) {
			for _, c := range l.Ended {
				e.whole(of+","+labels("reason", c.Of), c.Count)
			}
		})},
	{"shunt_udp_leases_refused_total", Counter, []string{"reason"}, "Connections of programs that had no lease, by reason: refused, busy, failed and others.",
		func(e *exposition, s *Sample) { counts(e, "reason", s.LeasesRefused) }},
	{"shunt_udp_datagrams_total", Counter, []string{"lease"}, "Datagrams to the addresses and ports of a lease while a program had it; with on_no_socket: drop also while none had it.",
		leases(func(e *exposition, labels string, l *Lease) { e.whole(labels, l.Matched) })},
	{"shunt_udp_datagrams_delivered_total", Counter, []string{"lease"}, "Datagrams of shunt_udp_datagrams_total that a program has read.",
		leases(func(e *exposition, labels string, l *Lease) { e.whole(labels, l.Delivered) })},
	{"shunt_udp_datagrams_passed_total", Counter, []string{"lease"}, "Datagrams of shunt_udp_datagrams_total that went to the kernel's socket, because their queue had no AF_XDP socket.",
		leases(func(e *exposition, labels string, l *Lease) { e.whole(labels, l.Passed) })},
	{"shunt_udp_datagrams_dropped_total", Counter, []string{"lease", "reason"}, "Datagrams of shunt_udp_datagrams_total that were dropped. ring_full: the program was too slow. fill_empty: it held too many frames. no_socket: no AF_XDP socket took them, and the entry has on_no_socket: drop.",
		leases(func(e *exposition, of string, l *Lease) {
			e.whole(of+","+labels("reason", "fill_empty"), l.FillEmpty)
			e.whole(of+","+labels("reason", "ring_full"), l.RingFull)
			e.whole(of+","+labels("reason", "no_socket"), l.NoSocket)
		})},
	{"shunt_udp_queue_datagrams_total", Counter, []string{"lease", "queue"}, "Datagrams of shunt_udp_datagrams_total on a queue that the lease has or had. Other datagrams came on queues that are not in the lease, or while no program had it.",
		byQueue(func(e *exposition, of string, c *QueueCounts) { e.whole(of, c.Matched) })},
	{"shunt_udp_queue_datagrams_delivered_total", Counter, []string{"lease", "queue"}, "Datagrams of shunt_udp_queue_datagrams_total that a program has read.",
		byQueue(func(e *exposition, of string, c *QueueCounts) { e.whole(of, c.Delivered) })},
	{"shunt_udp_queue_datagrams_passed_total", Counter, []string{"lease", "queue"}, "Datagrams of shunt_udp_queue_datagrams_total that went to the kernel's socket.",
		byQueue(func(e *exposition, of string, c *QueueCounts) { e.whole(of, c.Passed) })},
	{"shunt_udp_queue_datagrams_dropped_total", Counter, []string{"lease", "queue", "reason"}, "Datagrams of shunt_udp_queue_datagrams_total that were dropped, by reason, as in shunt_udp_datagrams_dropped_total.",
		byQueue(func(e *exposition, of string, c *QueueCounts) {
			e.whole(of+","+labels("reason", "fill_empty"), c.FillEmpty)
			e.whole(of+","+labels("reason", "ring_full"), c.RingFull)
			e.whole(of+","+labels("reason", "no_socket"), c.NoSocket)
		})},
	{"shunt_udp_invalid_total", Counter, []string{"lease", "ring"}, "Entries that a program wrote into a ring and that belong to no frame: addresses in the fill ring, descriptors in the transmit ring.",
		leases(func(e *exposition, of string, l *Lease) {
			e.whole(of+","+labels("ring", "fill"), l.Invalid)
			e.whole(of+","+labels("ring", "transmit"), l.TxInvalid)
		})},
	{"shunt_udp_claimed_stale_total", Counter, []string{"lease"}, "Datagrams that programs have dropped because they were too old, by their own count. shunt_udp_datagrams_delivered_total includes them.",
		claims(func(c *LeaseClaims) uint64 { return c.Stale })},
	{"shunt_udp_claimed_tx_short_total", Counter, []string{"lease"}, "Frames that programs could not send for lack of room, by their own count.",
		claims(func(c *LeaseClaims) uint64 { return c.TxShort })},
	{"shunt_udp_claimed_kicks_total", Counter, []string{"lease"}, "System calls that programs made to send frames, by their own count.",
		claims(func(c *LeaseClaims) uint64 { return c.Kicks })},
	{"shunt_udp_claimed_wakeups_total", Counter, []string{"lease"}, "Times that a datagram woke a program, by the program's own count. Each queue counts for itself.",
		claims(func(c *LeaseClaims) uint64 { return c.Wakeups })},
	{"shunt_udp_ring_waiting", Gauge, []string{"lease", "queue"}, "Datagrams in the receive ring of a queue that the program has not read.",
		queues(func(q *LeaseQueue) uint64 { return q.Waiting })},
	{"shunt_udp_ring_size", Gauge, []string{"lease", "queue"}, "The most datagrams that the receive ring of a queue has room for.",
		queues(func(q *LeaseQueue) uint64 { return q.Room })},
	{"shunt_udp_frames_free", Gauge, []string{"lease", "queue"}, "Frames of a queue that the kernel can receive into.",
		queues(func(q *LeaseQueue) uint64 { return q.Free })},
}

// leases writes a metric of each lease.
func leases(write func(e *exposition, labels string, l *Lease)) func(*exposition, *Sample) {
	return func(e *exposition, s *Sample) {
		for i := range s.Leases {
			write(e, labels("lease", s.Leases[i].Name), &s.Leases[i])
		}
	}
}

// claims writes a metric of each lease whose programs report.
func claims(number func(c *LeaseClaims) uint64) func(*exposition, *Sample) {
	return leases(func(e *exposition, of string, l *Lease) {
		if l.Claims != nil {
			e.whole(of, number(l.Claims))
		}
	})
}

// byQueue writes a metric of each queue that a lease has had.
func byQueue(write func(e *exposition, of string, c *QueueCounts)) func(*exposition, *Sample) {
	return leases(func(e *exposition, of string, l *Lease) {
		for i := range l.Counts {
			write(e, of+","+labels("queue", l.Counts[i].Queue), &l.Counts[i])
		}
	})
}

// queues writes a metric of each queue of the leases that are held.
func queues(number func(q *LeaseQueue) uint64) func(*exposition, *Sample) {
	return leases(func(e *exposition, of string, l *Lease) {
		for i := range l.Queues {
			e.whole(of+","+labels("queue", l.Queues[i].Queue), number(&l.Queues[i]))
		}
	})
}
