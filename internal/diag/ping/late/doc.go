// Package late has programs that hold probes for a known time at a place in the kernel. It is for tests.
package late

//go:generate ../../../../bpf/compile Late ../../../../bpf/diag/late.bpf.c
