package gate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/record"
)

// Status is the state of protection by opens that wait, in this process or in another, which may have ended.
type Status struct {
	PID     int                 `json:"pid"`
	Began   time.Time           `json:"began"`
	Ended   time.Time           `json:"ended,omitzero"` // zero: the process runs
	Killed  bool                `json:"killed"`         // the process did not end on purpose, and Ended is its last sign of life
	Objects int                 `json:"objects"`        // inodes
	Rules   []policy.RuleStatus `json:"rules"`
	Gaps    []policy.Gap        `json:"gaps"`   // operations that are not denied
	Waited  uint64              `json:"waited"` // opens that were answered; this counter and those below are zero after the end
	Took    float64             `json:"took"`   // seconds of all answers, each counted from the read of the open on
	Denied  uint64              `json:"denied"`
	Audited uint64              `json:"audited"`
	Late    uint64              `json:"late"`   // opens that went on because the answer was late
	Unsure  uint64              `json:"unsure"` // opens whose mode was unknown, so that all operations were judged that the rules forbid
	Unread  uint64              `json:"unread"` // new names that could not be read, or for which there was no room
}

// Status returns the present state.
func (g *Gate) Status() Status {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.status()
}

func (g *Gate) status() Status {
	r := g.ruling.Load()
	s := Status{PID: os.Getpid(), Began: g.began, Objects: len(g.marked), Gaps: Missing(r.rules), Rules: []policy.RuleStatus{}, Waited: g.counts[countWaited].Load(), Took: time.Duration(g.took.Load()).Seconds(), Denied: g.counts[countDenied].Load(), Audited: g.counts[countAudited].Load(),
		Late: g.counts[countLate].Load(), Unsure: g.counts[countUnsure].Load(), Unread: g.counts[countUnread].Load()}
	for _, rule := range r.rules {
		s.Rules = append(s.Rules, policy.RuleStatus{Name: rule.Name, Text: rule.String()})
	}
	return s
}

func noteIn(folder string) string { return filepath.Join(folder, "opens.json") }

// note writes a file from which a later process learns of this protection; beat keeps the file's time up to date. The caller holds the mutex.
func (g *Gate) note(ended time.Time) error {
	s := g.status()
	s.Ended = ended
	if err := record.Write(noteIn(g.options.Folder), s); err != nil {
		return fmt.Errorf("note that opens of files wait for this process: %w", err)
	}
	return nil
}

// beat notes that the process runs.
func (g *Gate) beat() {
	now := time.Now()
	_ = os.Chtimes(noteIn(g.options.Folder), now, now) // if this fails, the end is reported as earlier than it was
}

// End closes the Gate, and notes that protection has ended on purpose.
func (g *Gate) End() error {
	g.mutex.Lock()
	err := g.note(time.Now())
	g.mutex.Unlock()
	return errors.Join(err, g.Close())
}

// Look returns the state that a process with a Gate has noted before its end; nil: there was none. It must only be
// called while no agent runs.
func Look(folder string) (*Status, error) {
	text, err := os.ReadFile(noteIn(folder))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	s := &Status{}
	if err == nil {
		err = json.Unmarshal(text, s)
	}
	if err != nil {
		return nil, fmt.Errorf("read the note of an agent for which opens of files waited: %w", err)
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

// Forget removes the note; false: there is none. No agent may be running.
func Forget(folder string) (bool, error) {
	record.Sweep(folder, filepath.Base(noteIn(folder))) // of an agent that was killed while it wrote
	err := os.Remove(noteIn(folder))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
