package protect

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Attempt is an operation that rules forbid to the program that has tried it.
type Attempt struct {
	Time      time.Time `json:"time"`
	Denied    bool      `json:"denied"` // otherwise it was only audited
	Operation string    `json:"operation"`
	Path      string    `json:"path"`
	Rules     []string  `json:"rules"`
	PID       uint32    `json:"pid"`
	Comm      string    `json:"comm"`
	Program   string    `json:"program"`
	Target    uint32    `json:"target,omitempty"`   // of trace and kill: process ID; absent if the object of kill is a cgroup's file
	Severity  string    `json:"severity,omitempty"` // of a rule of detection
	Mitre     []string  `json:"mitre,omitempty"`    // of a rule of detection: techniques
	CgroupID  uint64    `json:"cgroup"`
	MountNS   uint32    `json:"mntns"`
}

// String returns the attempt as one line.
func (a Attempt) String() string {
	word := "audited"
	if a.Denied {
		word = "denied"
	}
	if a.Severity != "" {
		word += " " + a.Severity
	}
	object := a.Path
	if a.Target != 0 {
		object = fmt.Sprintf("process %d", a.Target)
	}
	if object != "" { // otherwise it has no file: a BPF program, a module from memory
		object = " of " + event.Printable(object)
	}
	text := fmt.Sprintf("%s %s %s%s by %s (pid %d, %s): rule %s", a.Time.Format("15:04:05.000"), word, a.Operation,
		object, event.Printable(a.Program), a.PID, event.Printable(a.Comm), strings.Join(a.Rules, ", "))
	if len(a.Mitre) > 0 {
		text += fmt.Sprintf(" (%s)", strings.Join(a.Mitre, ", "))
	}
	return text
}

// words has words for operations for which a policy has no word, or two.
var words = map[guardGuardOp]string{guardGuardOpGUARD_PROGRAM: "write-program", guardGuardOpGUARD_TRACE: "trace", guardGuardOpGUARD_MOUNT_ANY: "mount", guardGuardOpGUARD_TRACE_ANY: "trace"}

func wordOf(op guardGuardOp) string {
	if word, ok := words[op]; ok {
		return word
	}
	for word, number := range operations {
		if number == op {
			return word
		}
	}
	return fmt.Sprintf("operation-%d", op)
}

// names makes attempts from events.
type names struct {
	rules  *ebpf.Map
	booted time.Time
}

func newNames(rules *ebpf.Map) *names {
	return &names{rules, time.Now().Add(-time.Duration(bootNow()))}
}

func (n *names) attempt(e event.Event) (Attempt, error) {
	var raw guardGuardEvent
	if err := binary.Read(bytes.NewReader(e.Payload), binary.NativeEndian, &raw); err != nil {
		return Attempt{}, fmt.Errorf("decode an attempt of %d bytes: %w; the programs are of another version of shunt", len(e.Payload), err)
	}
	a := Attempt{
		Time: n.booted.Add(time.Duration(e.TimeNs)), Denied: raw.IsDenied != 0, Operation: wordOf(guardGuardOp(raw.Op)),
		PID: e.Tgid, Comm: event.Text(raw.Comm[:]), Target: raw.Target, CgroupID: e.CgroupID, MountNS: e.Mntns, Program: "the kernel",
	}
	for number := range uint32(policy.RulesMax) {
		if raw.Rules>>number&1 == 0 {
			continue
		}
		var r guardGuardRule
		if err := n.rules.Lookup(uint32(raw.Generation&1)*policy.RulesMax+number, &r); err != nil {
			return Attempt{}, fmt.Errorf("look up the name of rule %d: %w", number, err)
		}
		a.Rules = append(a.Rules, event.Text(r.Name[:]))
		a.Severity = policy.Worse(a.Severity, event.Text(r.Severity[:]))
		a.Mitre = append(a.Mitre, strings.Fields(event.Text(r.Mitre[:]))...)
	}
	points := mountPoints()
	if raw.File.Device != 0 {
		a.Path = pathOf(points, raw.File.Device, raw.Names[:min(int(raw.NamesSize), len(raw.Names))])
	}
	if raw.Program != (guardGuardFile{}) {
		a.Program = pathOf(points, raw.Program.Device, raw.ProgramNames[:min(int(raw.ProgramSize), len(raw.ProgramNames))])
	}
	return a, nil
}

// pathOf returns the path on a file system whose names are raw, the last one first, each ended by a zero.
func pathOf(points map[uint32]string, device uint32, raw []int8) string {
	path := event.Path(raw)
	point, known := points[device]
	switch {
	case !known:
		return fmt.Sprintf("[%d:%d]%s", device>>20, device&(1<<20-1), path) // mounted nowhere here
	case point == "/" && path != "":
		return path
	}
	return point + path
}

// mountPoints returns where file systems are mounted as a whole, by the kernel's number of their device
// (proc_pid_mountinfo(5)).
func mountPoints() map[uint32]string {
	points := map[uint32]string{}
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return points
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		var major, minor uint32
		if len(fields) < 5 || fields[3] != "/" {
			continue
		}
		if _, err := fmt.Sscanf(fields[2], "%d:%d", &major, &minor); err != nil {
			continue
		}
		if _, is := points[major<<20|minor]; !is {
			points[major<<20|minor] = fields[4]
		}
	}
	return points
}
