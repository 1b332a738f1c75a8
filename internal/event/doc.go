// Package event reads streams of events from BPF programs, and says exactly how many were lost.
package event
