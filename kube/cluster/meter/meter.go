// Package meter has a test cluster's client measure a way to a server, and says what the whole machine spent on it. Client
// and server are in the same or in different network namespaces of one machine, so all of the way is charged.
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

// Port is where the pods of a cluster's ServeLoad answer all kinds of package traffic.
const Port = 9000

// Sample is one measurement.
type Sample struct {
	traffic.Result
	Busy time.Duration `json:"busy_nanoseconds"` // of all CPUs meanwhile, for all processes; in steps of process.TickNs
}

// Turn is the first answer of a backend that a client waits for.
type Turn struct {
	At          time.Time `json:"at"`          // by the clock of the machine
	Connections int       `json:"connections"` // that it has opened, this one included
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

// CPUPerTransaction is the machine's CPU time of a transaction. idle is how many CPUs are busy without the load; it is
// taken off.
func (s Sample) CPUPerTransaction(idle float64) time.Duration {
	if s.Transactions == 0 {
		return 0
	}
	return time.Duration((float64(s.Busy) - idle*s.Seconds*float64(time.Second)) / float64(s.Transactions))
}

// Busy is how long the machine's CPUs have worked since its start, together: for programs, for the kernel, and for interrupts.
func Busy() (time.Duration, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	return parse(string(text))
}

// parse reads the line of all CPUs: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice, of which user
// and nice have the last two in them (proc_stat(5)).
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
