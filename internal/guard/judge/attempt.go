package judge

import (
	"fmt"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/event"
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
