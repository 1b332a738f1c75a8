package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/judge"
)

// question asks which operations on a file a process may do.
type question struct {
	Path    string `json:"path"` // absolute
	Process int    `json:"process"`
}

// explained is the answer. Both are empty if opens wait for no agent.
type explained struct {
	Explanation *judge.Explanation `json:"explanation,omitempty"`
	Error       string             `json:"error,omitempty"`
}

func explainIn(folder string) string { return filepath.Join(folder, "explain.sock") }

// explain reads one question of a connection, and answers it.
func (a *Agent) explain(c *net.UnixConn) {
	_ = c.SetDeadline(time.Now().Add(answerTime))
	var asked question
	var said explained
	err := json.NewDecoder(c).Decode(&asked)
	if err == nil {
		said.Explanation, err = a.explanation(asked)
	}
	if err != nil {
		said.Error = err.Error()
	}
	_ = json.NewEncoder(c).Encode(said) // a client that does not wait for the answer does not need it
}

// explanation returns nil if no opens wait.
func (a *Agent) explanation(asked question) (*judge.Explanation, error) {
	a.mutex.Lock() // the gate must not end meanwhile
	defer a.mutex.Unlock()
	if a.protects.gate == nil {
		return nil, nil
	}
	return a.protects.gate.Explain(asked.Path, asked.Process)
}

// Explain returns the answer of the agent that opens wait for, without BPF LSM; nil: opens wait for no agent.
func Explain(folder, path string, process int) (*judge.Explanation, error) {
	c, err := dial(explainIn(folder))
	if err != nil {
		return nil, fmt.Errorf("ask the agent to explain: %w", err)
	}
	if c == nil {
		return nil, nil
	}
	defer c.Close() //nolint:errcheck // all was read
	_ = c.SetDeadline(time.Now().Add(answerTime))
	if path, err = filepath.Abs(path); err != nil { // the agent has another folder
		return nil, fmt.Errorf("look at %s: %w", path, err)
	}
	var said explained
	err = json.NewEncoder(c).Encode(question{path, process})
	if err == nil {
		err = json.NewDecoder(c).Decode(&said)
	}
	if err != nil {
		return nil, fmt.Errorf("ask the agent to explain: %w", err)
	}
	if said.Error != "" {
		return nil, errors.New(said.Error)
	}
	return said.Explanation, nil
}
