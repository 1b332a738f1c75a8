// Package gate protects files where the kernel lets no BPF program decide: each open of a protected file waits until this process has judged it.
//
// It needs no BPF program, and protects less than package protect: only opens are refused, and only while this process runs. The reasons are in
// docs/design/54-without-lsm.md.
package gate
