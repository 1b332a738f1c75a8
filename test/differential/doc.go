// Package differential sends random packets through the loaded program and through a model of it
// in Go, and compares verdict, reasons, backend and every byte that leaves. It has tests and
// nothing else:
//
//	go test ./test/differential                                                    (as root)
//	go test ./test/differential -run TestDifferential -differential.seed=N -differential.packets=N
//
//	generator ─► frame ─┬─► loaded program ─► verdict, counters, frame ─┐
//	    ▲               └─► model ──────────► verdict, reasons, frame ──┴─► compare
//	    └──────────────────── what left is answered, quoted, followed ◄────┘
//
// The packets are mostly valid ones to every kind of service, then answers of backends, ICMP errors
// about what left, fragments, ARP and ND, tunnels; and a third is damaged on the way. An episode is
// 400 packets from empty tables. All of it follows from the episode's seed, except that the program
// draws source ports itself. A failure prints the seed, the packet, the difference field by field,
// and the fewest packets before it that are found to do.
//
// # The model
//
// It is written from the documents (docs/guide, docs/design, docs/reference/reasons.md,
// ARCHITECTURE.md, the packet tests) and the RFCs, with plain values: read the frame, decide, build
// what leaves. It shares no code with the programs and reads no map. Two things were taken from the
// sources, because nothing else says them: the flow hash, which is a promise between versions, and,
// where a packet has several faults at once, which of them is named. What a document says in so many
// words wins over both; so the first runs found five faults of the programs.
//
// # What the program may choose
//
// The model follows these, and refuses what is not allowed: source ports (in the pool, of nobody
// else; a closed connection's where none is free), outer source addresses (of the prefix), outer
// source ports and flow labels (the same for all packets of a flow), identifications of outer headers
// that routers may fragment. A flow whose first packet could not be sent on has a port that nobody
// has seen; it is learned from the first packet that shows it. Where such a port decides what becomes
// of others the episode ends, which is counted.
//
// # What is not asked here
//
//   - Time. Nothing ages within an episode, which is cut short after a second. Expiry: test/packet.
//   - Rate limits of what the program sends itself are lifted before they are reached, and a source
//     rate is one flow a second, so one an episode. The limits themselves: test/packet.
//   - Changes of the configuration but for a backend that goes in the middle of an episode, slots
//     that are not settled, and what is remembered then: test/place. So not_remembered does not
//     occur.
//   - A daemon that is silent (fib_fallback, egress_unlisted), tables that are full (table_full,
//     flows_full, handshake_evicted), and several CPUs at once (claim_race, flow_recycled): test/packet.
//   - Which interface a frame leaves by is told by its source address: a test run sends nothing.
//   - Frames in several buffers, and the hooks of backends (decap_…): test/packet and test/net.
package differential
