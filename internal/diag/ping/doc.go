// Package ping says in which stage of which host a packet lost its time.
//
// A client sends ICMP echo requests, which the server's kernel answers. BPF programs stamp each probe where it passes
// the network stacks of both hosts. A process on the server sends its stamps back, in echo replies of its own. The
// client brings both clocks together, and has an account of the whole round trip.
package ping
