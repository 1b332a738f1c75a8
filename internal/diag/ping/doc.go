// Package ping finds the stage, and the host, in which a packet lost its time.
//
// A client sends ICMP echo requests, which the server's kernel answers. BPF programs stamp each probe where it passes
// the network stacks of both hosts. A process on the server sends the server's stamps back, in echo replies of its own. The
// client relates the two clocks, and accounts for the whole round trip.
package ping
