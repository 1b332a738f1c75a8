package protect

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// GateStatus is the state of protection that this process or another gives, or gave, by having opens wait.
type GateStatus struct {
	PID     int          `json:"pid"`
	Began   time.Time    `json:"began"`
	Ended   time.Time    `json:"ended,omitzero"` // zero: it is at work
	Killed  bool         `json:"killed"`         // it ended without saying so, and Ended is when it was last at work
	Objects int          `json:"objects"`        // inodes
	Rules   []RuleStatus `json:"rules"`
	Gaps    []policy.Gap `json:"gaps"`   // operations that are not denied
	Waited  uint64       `json:"waited"` // opens that were answered; this and the following are zero once it has ended
	Took    float64      `json:"took"`   // seconds of all answers, each from when the open was read on
	Denied  uint64       `json:"denied"`
	Audited uint64       `json:"audited"`
	Late    uint64       `json:"late"`   // opens that went on because the answer was late
	Unsure  uint64       `json:"unsure"` // opens whose mode is not known: judged as all that the rules forbid
	Unread  uint64       `json:"unread"` // new names that could not be looked at, or for which there was no room
}

// Status is how it goes.
func (g *Gate) Status() GateStatus {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.status()
}

func (g *Gate) status() GateStatus {
	r := g.ruling.Load()
	s := GateStatus{PID: os.Getpid(), Began: g.began, Objects: len(g.marked), Gaps: Missing(r.rules), Rules: []RuleStatus{}, Waited: g.counts[gateWaited].Load(), Took: time.Duration(g.took.Load()).Seconds(), Denied: g.counts[gateDenied].Load(), Audited: g.counts[gateAudited].Load(),
		Late: g.counts[gateLate].Load(), Unsure: g.counts[gateUnsure].Load(), Unread: g.counts[gateUnread].Load()}
	for _, rule := range r.rules {
		s.Rules = append(s.Rules, RuleStatus{rule.Name, rule.String()})
	}
	return s
}

func noteIn(folder string) string { return filepath.Join(folder, "opens.json") }

// note has it known after this process that there was such protection; its time says when it was last at work. The mutex is held.
func (g *Gate) note(ended time.Time) error {
	s := g.status()
	s.Ended = ended
	text, err := json.Marshal(s)
	if err == nil {
		err = os.WriteFile(noteIn(g.options.Folder)+".new", text, 0o600)
	}
	if err == nil {
		err = os.Rename(noteIn(g.options.Folder)+".new", noteIn(g.options.Folder))
	}
	if err != nil {
		return fmt.Errorf("note that opens of files wait for this process: %w", err)
	}
	return nil
}

// beat notes that it is at work.
func (g *Gate) beat() {
	now := time.Now()
	_ = os.Chtimes(noteIn(g.options.Folder), now, now) // without it the end is told as earlier than it was
}

// End is Close, and notes that protection has ended on purpose.
func (g *Gate) End() error {
	g.mutex.Lock()
	err := g.note(time.Now())
	g.mutex.Unlock()
	return errors.Join(err, g.Close())
}

// LookGate is the state that a process noted that had opens wait and has ended; nil: there was none. It is for when no agent is at work.
func LookGate(folder string) (*GateStatus, error) {
	text, err := os.ReadFile(noteIn(folder))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	s := &GateStatus{}
	if err == nil {
		err = json.Unmarshal(text, s)
	}
	if err != nil {
		return nil, fmt.Errorf("read whether opens of files waited for an agent: %w", err)
	}
	if s.Ended.IsZero() {
		info, err := os.Stat(noteIn(folder))
		if err != nil {
			return nil, err
		}
		s.Killed, s.Ended = true, info.ModTime()
	}
	return s, nil
}

// ForgetGate takes the note away; false: there is none.
func ForgetGate(folder string) (bool, error) {
	err := os.Remove(noteIn(folder))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
