package demo

import (
	"github.com/shunt-lb/shunt/internal/story"
	"github.com/shunt-lb/shunt/internal/udp/broker"
	"github.com/shunt-lb/shunt/internal/udp/lease"
)

// Facts are the demo's findings; `shunt demo udp -o json` prints them as JSON.
type Facts struct {
	OK       bool           `json:"ok"` // every claim is true
	ID       string         `json:"id"`
	Seconds  float64        `json:"seconds"`
	Mode     string         `json:"mode"`             // of the AF_XDP sockets: zero-copy, copy or generic
	Reason   string         `json:"reason,omitempty"` // reason for a mode other than zero-copy
	Ring     uint32         `json:"ring_entries"`     // of each receive ring
	Worker   Worker         `json:"worker"`
	Ways     []Way          `json:"ways"`
	Queues   []lease.Status `json:"queues"`
	Past     broker.Totals  `json:"past"` // of the lease, after it was given back
	Fallback float64        `json:"fallback_milliseconds"`
	Claims   story.Claims   `json:"claims"`
}

// Worker is the process that answers.
type Worker struct {
	PID          int    `json:"pid"`
	UID          int    `json:"uid"`
	Capabilities string `json:"capabilities"`   // CapEff and CapPrm of /proc/PID/status, or'ed
	Refused      string `json:"socket_refused"` // the kernel's answer when the worker makes an AF_XDP socket itself
	Delivered    uint64 `json:"delivered"`      // datagrams from AF_XDP
	Invalid      uint64 `json:"invalid"`        // frames outside of the memory
	Kicks        uint64 `json:"kicks"`          // system calls that have answers sent
	Wakeups      uint64 `json:"wakeups"`        // sleeps that ended with a datagram
	Collections  uint32 `json:"gc"`             // garbage collections since the start
	CPUs         []int  `json:"cpus,omitempty"` // of the client and the worker; none: they were not bound to CPUs
}

// Way is one way to receive, measured in several rounds. All figures are medians of rounds.
type Way struct {
	Name      string  `json:"name"`
	Rounds    []Round `json:"rounds"`
	P50       float64 `json:"p50_microseconds"`
	P99       float64 `json:"p99_microseconds"`
	P999      float64 `json:"p999_microseconds"`
	PerSecond float64 `json:"answers_per_second"`
}

// Round is one measurement.
type Round struct {
	Asked     int     `json:"asked"`
	Late      int     `json:"late"`  // questions without an answer in time
	Wrong     int     `json:"wrong"` // answered by the other way
	P50       float64 `json:"p50_microseconds"`
	P99       float64 `json:"p99_microseconds"`
	P999      float64 `json:"p999_microseconds"`
	PerSecond float64 `json:"answers_per_second"`
}
