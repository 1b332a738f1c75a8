package detect

import (
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/process"
)

func put(to []int8, text string) uint32 {
	for i := range len(text) {
		to[i] = int8(text[i])
	}
	return uint32(len(text))
}

// ordinary is an event that no built-in rule holds of, of a shell that was started by another one.
func ordinary(of detectDetectType) *detectDetectEvent {
	e := &detectDetectEvent{Type: uint32(of), ProgramLinks: 1}
	e.Program.Inode = 7
	put(e.Comm[:], "ls")
	e.ProgramSize = put(e.ProgramNames[:], "ls\x00bin\x00usr\x00")
	e.ArgsSize = put(e.Args[:], "ls\x00-l\x00/srv\x00")
	for i := range 3 {
		e.Parents[i].Tgid, e.Parents[i].StartNs, e.Parents[i].Program.Inode = uint32(900-i), 5, 9
		put(e.Parents[i].Comm[:], "sh")
	}
	for i := range e.Fds {
		e.Fds[i] = detectDetectFd{Kind: uint32(detectDetectKindDETECT_INET), Direction: uint32(detectDetectDirectionDETECT_IN), RemotePort: 22, Remote: [16]uint8{10: 0xff, 11: 0xff, 12: 127, 15: 1}}
	}
	e.Socket = e.Fds[0]
	switch of {
	case detectDetectTypeDETECT_MODULE:
		put(e.Comm[:], "systemd")
		e.ProgramSize = put(e.ProgramNames[:], "systemd\x00")
	case detectDetectTypeDETECT_BPF:
		e.ProgramSize = put(e.ProgramNames[:], "tc\x00")
	case detectDetectTypeDETECT_PTRACE:
		e.Number = 16
		e.ProgramSize = put(e.ProgramNames[:], "gdb\x00")
	case detectDetectTypeDETECT_MOUNT:
		e.ObjectSize = put(e.Object[:], "/mnt")
	case detectDetectTypeDETECT_EXEC:
		e.ObjectSize = put(e.Object[:], "/usr/bin/ls")
	default:
		e.ObjectSize = put(e.Object[:], "notes\x00srv\x00")
	}
	return e
}

// unattached judges events, and has nothing in the kernel.
func unattached(rules []rule.Rule) *Watch {
	return &Watch{judge: newJudge(rules), programs: newPrograms(), containers: containers{0: ""}, received: map[string]uint64{}}
}

// An event that no rule holds of allocates nothing, of each type, also of a process that was not seen before.
func TestEventsThatNoRuleWantsAllocateNothing(t *testing.T) {
	for of, word := range typeWords {
		t.Run(word, func(t *testing.T) {
			w := unattached(slices.DeleteFunc(rule.Builtin(), func(r rule.Rule) bool { return r.IsOff }))
			raw := event.Event{Header: event.Header{Tgid: 1000, TaskStartNs: 6, TimeNs: 1}, Payload: encoded(*ordinary(of))}
			var c tally
			none := func(f Found) error { return fmt.Errorf("it was found: %v", f) }
			// Maps grow now and then, so the process that is new each time costs less than one allocation.
			n := testing.AllocsPerRun(1000, func() {
				raw.Tgid++
				if err := w.take(raw, &c, none, nil); err != nil {
					t.Fatal(err)
				}
			})
			if n != 0 {
				t.Errorf("%v allocations", n)
			}
			if w.received[word] != 1001 {
				t.Errorf("%d events were received: %v", w.received[word], w.received)
			}
		})
	}
}

// A finding stays as it was after later events have been read.
func TestWhatIsToldStays(t *testing.T) {
	always := rule.Rule{Name: "all", On: rule.Types, If: "true", Action: rule.Log, Tell: "{process.args}"}
	if _, err := always.Prepare(); err != nil {
		t.Fatal(err)
	}
	w := unattached([]rule.Rule{always})
	var told []Found
	var seen []*rule.Event
	var before []string
	text := func(e *rule.Event) string {
		return fmt.Sprint(e.Type, e.Path, e.Process, e.Ancestors, e.FDs, e.File, e.Socket, e.Before)
	}
	for i, of := range []detectDetectType{detectDetectTypeDETECT_OPEN, detectDetectTypeDETECT_CONNECT, detectDetectTypeDETECT_SETUID, detectDetectTypeDETECT_EXEC} {
		e := ordinary(of)
		e.Before.Uid, e.File.Inode = uint32(i), uint64(i)
		e.Args[0] += int8(i)
		raw := event.Event{Header: event.Header{Tgid: uint32(2000 + i), TaskStartNs: 6}, Payload: encoded(*e)}
		for p := range e.Parents { // another chain
			e.Parents[p].Tgid += uint32(10 * i)
		}
		raw.Payload = encoded(*e)
		err := w.take(raw, new(tally), func(f Found) error { told = append(told, f); return nil }, func(e *rule.Event) error {
			seen, before = append(seen, e), append(before, text(e))
			return nil
		})
		if err != nil || len(told) != i+1 {
			t.Fatalf("%d were told: %v", len(told), err)
		}
	}
	for i, want := range before {
		if got := text(seen[i]); got != want {
			t.Errorf("event %d is now\n%s, and was\n%s", i, got, want)
		}
		if got := text(told[i].Event); got != want {
			t.Errorf("the event that was told is now\n%s, and was\n%s", got, want)
		}
	}
}

// A process is looked up in /proc once, and not at all if the event has its program, or it is a fork of a known
// process.
func TestProcessesAreLookedUpOnce(t *testing.T) {
	self := rule.Process{PID: uint32(os.Getpid()), Executable: rule.File{Inode: 9}}
	start, err := startOf(self.PID)
	if err != nil {
		t.Fatal(err)
	}
	self.StartNs = start * process.TickNs
	gone := rule.Process{PID: 1 << 30, StartNs: 1}
	fork := rule.Process{PID: 5, StartNs: 6, Executable: self.Executable}
	p := newPrograms()
	for i, c := range []struct {
		ancestors []rule.Process
		reads     uint64
	}{
		{[]rule.Process{self}, 1}, {[]rule.Process{self}, 1}, {[]rule.Process{fork, self}, 1}, {[]rule.Process{gone, self}, 2}, {[]rule.Process{gone}, 2},
		{[]rule.Process{{PID: 3000, StartNs: 9}}, 2}, // whose own event was seen
	} {
		if i == 4 {
			p.name(&rule.Event{Process: rule.Process{PID: 3000, StartNs: 9, Program: "/bin/x"}})
		}
		e := &rule.Event{Process: rule.Process{PID: 4000, StartNs: 9, Program: "/bin/y"}, Ancestors: c.ancestors}
		p.name(e)
		if p.reads != c.reads {
			t.Errorf("case %d: %d look-ups, want %d", i, p.reads, c.reads)
		}
		if last := e.Ancestors[len(e.Ancestors)-1]; last.PID == self.PID && last.Program == "" || e.Ancestors[0].PID == fork.PID && e.Ancestors[0].Program != last.Program {
			t.Errorf("case %d: %+v", i, e.Ancestors)
		}
	}
}

// Events are read together while they are only reported; a rule that ends or stops processes has every event read at
// once.
func TestWhatIsEndedDoesNotWait(t *testing.T) {
	quiet := []rule.Rule{{Action: rule.Log}, {Action: rule.Alert}, {Action: rule.Deny}}
	if got := gatherFor(quiet); got != gather {
		t.Errorf("events that are told of come together for %v, want %v", got, gather)
	}
	for _, action := range []string{rule.Kill, rule.Stop} {
		if got := gatherFor(append(quiet, rule.Rule{Action: action})); got != 0 {
			t.Errorf("with a rule whose action is %s, events come together for %v", action, got)
		}
	}
}
