// Package hold has BPF programs that keep a CPU busy for a known time. Only tests use it.
package hold
