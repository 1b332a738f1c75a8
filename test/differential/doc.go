// Package differential sends random packets through the loaded program and through a model of it in Go,
// and compares verdict, reasons, backend and every byte that leaves. It has only tests:
//
//	go test ./test/differential                                                    (as root)
//	go test ./test/differential -run TestDifferential -differential.seed=N -differential.packets=N
//
//	generator ─► frame ─┬─► loaded program ─► verdict, counters, frame ─┐
//	    ▲               └─► model ──────────► verdict, reasons, frame ──┴─► compare
//	    └──────────────────── frames sent: answered, quoted, followed ◄────┘
//
// Most packets are valid and go to every kind of service; others are answers of backends, ICMP errors
// about sent packets, fragments, ARP and ND, tunnels; and a third is damaged on the way. An episode is
// 400 packets from empty tables. All of it follows from the episode's seed, except that the program
// draws source ports itself. A failure prints the seed, the packet, the difference field by field, and
// as few packets before it as the search found to be enough.
//
// # The model
//
// The model is written from the documents (docs/guide, docs/design, docs/reference/reasons.md,
// ARCHITECTURE.md, the packet tests) and the RFCs, with plain values: read the frame, decide, build the
// outgoing frame. It shares no code with the programs and reads no map. Two things were taken from the
// sources, because no document has them: the flow hash, which is a promise between versions, and, if a
// packet has several faults at once, the fault that is named. Where a document states one of these, the
// document wins; so the first runs found five faults of the programs.
//
// # Choices of the program
//
// The model follows these choices, and refuses forbidden ones: source ports (in the pool, and of no
// other flow; a closed connection's if none is free), outer source addresses (of the prefix), outer
// source ports and flow labels (the same for all packets of a flow), identifications of outer headers
// that routers may fragment. A flow whose first packet could not be sent on has a port that the model
// has not seen; it learns the port from the first packet that shows it. If such a port decides the
// verdict of other packets, the episode ends, and a counter counts that.
//
// # Not tested here
//
//   - Time. Nothing ages within an episode, which is cut short after a second. Expiry: test/packet.
//   - Rate limits of the program's own packets are lifted before they are reached, and a source
//     rate is one flow a second, so one an episode. The limits themselves: test/packet.
//   - Changes of the configuration except the removal of a backend in the middle of an episode, slots
//     that are not settled, and the entries remembered then: test/place. So not_remembered does not
//     occur.
//   - A silent daemon (fib_fallback, egress_unlisted), full tables (table_full,
//     flows_full, handshake_evicted), and several CPUs at once (claim_race, flow_recycled): test/packet.
//   - The outgoing interface is only known by a frame's source address: a test run sends nothing.
//   - Frames in several buffers, and the hooks of backends (decap_…): test/packet and test/net.
package differential
