// Package event reads streams of events from BPF programs, and counts lost events exactly.
package event
