package decoy

import (
	"maps"
	"slices"
	"time"
)

// touchesMax is the number of touches in the status: the newest.
const touchesMax = 32

// Touch is an act of a process on a decoy.
type Touch struct {
	At      time.Time `json:"at"`
	Path    string    `json:"path"`
	How     string    `json:"how"`
	Program string    `json:"program"`
	PID     int       `json:"pid"`
}

// Status is the state of decoys.
type Status struct {
	Stand     int            `json:"stand"`
	Changed   int            `json:"changed"`
	Gone      int            `json:"gone"`
	Unknown   int            `json:"unknown"`
	Folders   map[string]int `json:"folders"` // number of unchanged decoys, by folder
	Touched   []Touch        `json:"touched"` // the newest last
	Unwatched []string       `json:"unwatched,omitempty"`
	Events    uint64         `json:"events"`
	Lost      uint64         `json:"lost"` // times that the kernel's queue was full
}

// Status returns the state. It may be called while Run is at work.
func (w *Watch) Status() Status {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	s := w.status
	s.Folders = map[string]int{}
	s.Touched, s.Unwatched = slices.Clone(s.Touched), slices.Clone(w.unwatched)
	for f := range maps.Values(w.folders) {
		s.Folders[f.Path] = 0
		for _, b := range f.baits {
			switch b.state {
			case Stands:
				s.Stand++
				s.Folders[f.Path]++
			case Changed:
				s.Changed++
			case Gone:
				s.Gone++
			default:
				s.Unknown++
			}
		}
	}
	return s
}

// count counts an event of the kernel, or a loss of events.
func (w *Watch) count(isLoss bool) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if isLoss {
		w.status.Lost++
	} else {
		w.status.Events++
	}
}

// touch remembers the process that touched a decoy.
func (w *Watch) touch(b *bait, how string, c []proc) {
	t := Touch{At: time.Now(), Path: b.Path, How: how}
	if len(c) > 0 {
		t.Program, t.PID = c[0].program, c[0].pid
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if w.status.Touched = append(w.status.Touched, t); len(w.status.Touched) > touchesMax {
		w.status.Touched = w.status.Touched[1:]
	}
}

// become sets the state of a decoy.
func (w *Watch) become(b *bait, state string) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	b.state = state
}
