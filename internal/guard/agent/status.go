package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/decoy"
	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/gate"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
)

// RunDirectory has the agent's lock and socket while one is at work.
const RunDirectory = "/run/shunt/guard"

// answerTime bounds the wait for a client of the status.
const answerTime = 5 * time.Second

// Told has the number of messages, and of those lost because the writer was slower.
type Told struct {
	Told uint64 `json:"told"`
	Lost uint64 `json:"lost"`
}

// Feature is the state of one feature.
type Feature struct {
	Name    string            `json:"name"`
	On      bool              `json:"on"`
	Since   time.Time         `json:"since,omitzero"` // in this process
	Rules   int               `json:"rules"`
	Events  uint64            `json:"events"`            // received
	Lost    uint64            `json:"lost"`              // for want of room, before they were read
	LostBy  map[string]uint64 `json:"lost_by,omitempty"` // the same by stream: none takes the room of another
	Shed    uint64            `json:"shed"`              // left out to save CPU
	Thinned []detect.Thinned  `json:"thinned,omitempty"` // types of events of which some are left out now, or were
	Missed  uint64            `json:"missed"`            // runs of programs that the kernel left out
	Alerts  uint64            `json:"alerts"`            // denied attempts, and events found by rules whose action is not log
	Why     string            `json:"why,omitempty"`     // why it is off, or only opens wait, although the policy has rules of it
	Names   []string          `json:"names"`             // of the policy's rules, also of rules that are switched off
	Gaps    []policy.Gap      `json:"gaps,omitempty"`    // operations that the kernel does not deny, or not every time
	Opens   *gate.Status      `json:"opens,omitempty"`   // of protection by holding opens, which ends with the process
	Decoys  *decoy.Status     `json:"decoys,omitempty"`
}

// Failed reports whether the feature is off although the policy has rules of it and nobody switched it off.
func (f Feature) Failed() bool { return !f.On && f.Why != "" }

// Status is the state of an agent.
type Status struct {
	PID      int       `json:"pid"`
	Began    time.Time `json:"began"`
	Reloads  uint64    `json:"reloads"`
	Features []Feature `json:"features"`
	Off      []Off     `json:"off"`              // by hand
	Budget   *Budget   `json:"budget,omitempty"` // of CPU; nil: no limit
	Alerts   Told      `json:"alerts"`
	Notes    Told      `json:"notes"` // events that are only noted: audited operations, and rules whose action is log
}

// IsOn reports whether a feature is on.
func (s Status) IsOn() bool {
	return slices.ContainsFunc(s.Features, func(f Feature) bool { return f.On })
}

// lock makes the folder and locks it for this agent alone; if another has it, protect.ErrListening is in the error.
func lock(folder string) (unlock func(), err error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, fmt.Errorf("make the agent's folder: %w", err)
	}
	return protect.Alone(folder)
}

func socketIn(folder string) string { return filepath.Join(folder, "status.sock") }

// serve answers each connection of the first socket with the status, takes one switch from each connection of the second, and answers one question from each
// connection of the third. Only root can use the sockets.
func (a *Agent) serve() error {
	status := func(c *net.UnixConn) {
		_ = c.SetDeadline(time.Now().Add(answerTime))
		_ = json.NewEncoder(c).Encode(a.Status()) // a client that does not wait for the answer does not need it
	}
	return errors.Join(a.offer(socketIn(a.options.Folder), status), a.offer(controlIn(a.options.Folder), a.control), a.offer(explainIn(a.options.Folder), a.explain))
}

// offer listens at a socket, and answers its connections one at a time.
func (a *Agent) offer(path string, respond func(*net.UnixConn)) error {
	// A killed agent may have left its socket. This agent has the lock, so no other one listens.
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the socket of an earlier agent: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return fmt.Errorf("listen at the agent's socket %s: %w", filepath.Base(path), err)
	}
	a.serving = append(a.serving, l)
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return // closed
			}
			respond(c)
			_ = c.Close()
		}
	}()
	return nil
}

// dial connects to a socket of the agent at work; nil: there is none.
func dial(path string) (net.Conn, error) {
	c, err := net.DialTimeout("unix", path, answerTime)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, nil
	}
	return c, err
}

// Ask returns the status of the agent at work; nil: there is none.
func Ask(folder string) (*Status, error) {
	c, err := dial(socketIn(folder))
	if err != nil {
		return nil, fmt.Errorf("ask the agent for its status: %w", err)
	}
	if c == nil {
		return nil, nil
	}
	defer c.Close() //nolint:errcheck // only read
	_ = c.SetDeadline(time.Now().Add(answerTime))
	s := &Status{}
	if err := json.NewDecoder(c).Decode(s); err != nil {
		return nil, fmt.Errorf("read the status of the agent: %w", err)
	}
	return s, nil
}

// Status returns the agent's state.
func (a *Agent) Status() Status {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	s := Status{PID: os.Getpid(), Began: a.began, Reloads: a.reloads, Off: append([]Off{}, a.off...)}
	s.Alerts, s.Notes = a.queue.counts()
	s.Budget, _ = a.budget.status() // then the number is missing, and nothing else
	for _, f := range a.features {
		one := f.status()
		one.Alerts = a.queue.heardOf(one.Name).alerts
		one.Names = rulesOf(a.policy, one.Name)
		s.Features = append(s.Features, one)
	}
	return s
}
