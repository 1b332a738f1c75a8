// Package late has programs that keep probes at a place of the kernel for a known time. It is for tests.
package late

//go:generate ../../../../bpf/compile Late ../../../../bpf/diag/late.bpf.c
