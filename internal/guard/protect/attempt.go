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
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// words has the words of events for operations of which a policy's words say more.
var words = map[guardGuardOp]string{guardGuardOpGUARD_MOUNT_ANY: policy.Mount, guardGuardOpGUARD_TRACE_ANY: judge.Trace}

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

func (n *names) attempt(e event.Event) (judge.Attempt, error) {
	var raw guardGuardEvent
	if err := binary.Read(bytes.NewReader(e.Payload), binary.NativeEndian, &raw); err != nil {
		return judge.Attempt{}, fmt.Errorf("decode an attempt of %d bytes: %w; the programs are of another version of shunt", len(e.Payload), err)
	}
	a := judge.Attempt{
		Time: n.booted.Add(time.Duration(e.TimeNs)), Denied: raw.IsDenied != 0, Operation: wordOf(guardGuardOp(raw.Op)),
		PID: e.Tgid, Comm: event.Text(raw.Comm[:]), Target: raw.Target, CgroupID: e.CgroupID, MountNS: e.Mntns, Program: "the kernel",
	}
	for number := range uint32(policy.RulesMax) {
		if raw.Rules>>number&1 == 0 {
			continue
		}
		var r guardGuardRule
		if err := n.rules.Lookup(uint32(raw.Generation&1)*policy.RulesMax+number, &r); err != nil {
			return judge.Attempt{}, fmt.Errorf("look up the name of rule %d: %w", number, err)
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
