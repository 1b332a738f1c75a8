// Package meter measures a way from a test cluster's client to a server, with the CPU time of the whole machine. Client
// and server are in the same or in different network namespaces of one machine, so the whole way is charged.
package meter

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/shunt-lb/shunt/internal/process"
)

// Port is the port on which the pods of ServeLoad answer all kinds of package traffic.
const Port = 9000

// Sample is one measurement.
type Sample struct {
	traffic.Result
	Busy time.Duration `json:"busy_nanoseconds"` // of all CPUs meanwhile, for all processes; in steps of process.TickNs
}

// Turn is the first answer of the backend that a client waits for.
type Turn struct {
	At          time.Time `json:"at"`          // by the clock of the machine
	Connections int       `json:"connections"` // that the client has opened, including this one
}

// Here is the caller's own network namespace, for package traffic.
type Here struct{}

// Run calls do.
func (Here) Run(do func() error) error { return do() }

// Measure is traffic.Measure, with the machine's CPU time.
func Measure(in traffic.Namespace, kind traffic.Kind, to netip.AddrPort, duration time.Duration) (s Sample, err error) {
	before, err := Busy()
	if err != nil {
		return s, err
	}
	if s.Result, err = traffic.Measure(in, kind, to, duration); err != nil {
		return s, err
	}
	after, err := Busy()
	s.Busy = after - before
	return s, err
}

// CPUPerTransaction returns the machine's CPU time of a transaction. idle is the number of CPUs that are busy without the load; it is
// subtracted.
func (s Sample) CPUPerTransaction(idle float64) time.Duration {
	if s.Transactions == 0 {
		return 0
	}
	return time.Duration((float64(s.Busy) - idle*s.Seconds*float64(time.Second)) / float64(s.Transactions))
}

// Busy returns the time for which the machine's CPUs have worked since its start, all together: for programs, the kernel, and interrupts.
func Busy() (time.Duration, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	return parse(string(text))
}

// parse reads the line of all CPUs: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice; user
// and nice include the last two (proc_stat(5)).
func parse(stat string) (busy time.Duration, err error) {
	line, _, _ := strings.Cut(stat, "\n")
	fields := strings.Fields(line)
	if len(fields) < 8 || fields[0] != "cpu" {
		return 0, fmt.Errorf("read /proc/stat: %q is not its line of all CPUs", line)
	}
	var failures []error
	for _, i := range []int{1, 2, 3, 6, 7} {
		ticks, err := strconv.ParseUint(fields[i], 10, 63)
		failures = append(failures, err)
		busy += time.Duration(ticks) * process.TickNs
	}
	if err := errors.Join(failures...); err != nil {
		return 0, fmt.Errorf("read /proc/stat: %w", err)
	}
	return busy, nil
}
