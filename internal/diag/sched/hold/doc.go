// Package hold has BPF programs that keep a CPU busy for a known time. It is for tests only.
package hold
