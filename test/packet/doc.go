// Package packet sends packets through the loaded program with BPF_PROG_TEST_RUN and compares the output, field
// by field. It has only tests:
//
//	go test ./test/packet                              (as root)
//	go test ./test/packet -run '^$' -fuzz FuzzPacket   (as root)
//
// Each test has a network namespace, a data plane and services to itself. The namespace and the programs may be
// the ones that an earlier test had and has left as it found them (site); the maps are emptied between the two:
//
//	client 198.51.100.7 ── router 02::7 ──┐ shunt-a                    shunt-c ┌── backends of two arms
//	      2001:db8:9::7                   ├─ 192.0.2.1    the program   10.0.0.1 ┤   10.0.0.20 …
//	backends of one arm 192.0.2.20 … ─────┘ 2001:db8:1::1  2001:db8:2::1         └── 2001:db8:2::20 …
//
// State comes in the product's way: through reconcile and datapath. Tests of the placement of flows write slots
// and records themselves, through datapath alone (placed).
package packet
