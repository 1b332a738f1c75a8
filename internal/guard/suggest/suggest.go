// Package suggest proposes a policy from the attempts that its rules have reported.
package suggest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/value"
)

const (
	lineMax     = 1 << 18 // bytes of an attempt, or of an event of detection
	programsMax = 1000    // of a rule
)

// Program lists the forbidden operations of a program.
type Program struct {
	Path       string   `json:"path"`
	Operations []string `json:"operations"` // each once, in the order of their first attempts
	Times      int      `json:"times"`
	Example    string   `json:"example"`       // object of the first attempt: a path, or a process
	Not        string   `json:"not,omitempty"` // why the suggestion does not trust it; empty: it does

	denied int
}

// Rule lists the attempts that a rule reported.
type Rule struct {
	Name     string     `json:"name"`
	Programs []*Program `json:"programs"` // the most active first

	byPath map[string]*Program
}

// Suggestion is a policy that trusts and excepts the audited programs and connections.
type Suggestion struct {
	Rules       []*Rule       `json:"rules"`       // rules with reports, in the order of the policy
	Connections []*Connection `json:"connections"` // the same, of rules of connections
	Unknown     int           `json:"unknown"`     // attempts of rules that the policy does not have
	Policy      policy.Policy `json:"-"`
}

// reading is an unfinished suggestion.
type reading struct {
	*Suggestion
	denials     []policy.Rule // of detection, which trust no program
	rules       map[string]*Rule
	connections map[string]*Connection
}

// Read makes a suggestion of attempts, one JSON object a line, as `shunt guard run -o json` writes them.
func Read(p policy.Policy, attempts io.Reader) (*Suggestion, error) {
	s := &reading{&Suggestion{Rules: []*Rule{}, Connections: []*Connection{}, Policy: p}, p.Denials(), map[string]*Rule{}, map[string]*Connection{}}
	lines := bufio.NewScanner(attempts)
	lines.Buffer(nil, lineMax)
	number := 0
	for lines.Scan() {
		if number++; len(strings.TrimSpace(lines.Text())) == 0 {
			continue
		}
		if err := s.line(lines.Bytes()); err != nil {
			return nil, fmt.Errorf("line %d %w", number, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read line %d: %w", number+1, err)
	}
	s.Policy.Rules = slices.Clone(p.Rules)
	for i, r := range s.Policy.Rules {
		if told := s.rules[r.Name]; told != nil {
			s.Rules = append(s.Rules, told)
			s.Policy.Rules[i].Trust.Programs = append(slices.Clone(r.Trust.Programs), told.trusted(r)...)
		}
	}
	s.except()
	return s.Suggestion, nil
}

// line counts an attempt.
func (s *reading) line(text []byte) error {
	var line struct {
		judge.Attempt
		Found      json.RawMessage  `json:"found"`      // findings of rules of detection, in between
		Connection *connect.Attempt `json:"connection"` // an attempt that a rule of connections forbids
		Switched   json.RawMessage  `json:"switched"`   // switches by hand
	}
	err := json.Unmarshal(text, &line)
	if err == nil && (line.Found != nil || line.Switched != nil) {
		return nil
	}
	a := line.Attempt
	if c := line.Connection; c != nil { // it may have no address
		a.Operation, a.Program, a.Rules = c.Operation, c.Program, c.Rules
	}
	if err == nil && (a.Operation == "" || a.Program == "" || len(a.Rules) == 0) {
		err = errors.New("it has no operation, program or rules")
	}
	if err != nil {
		return fmt.Errorf("is no event of `shunt guard run -o json`: %w", err)
	}
	for _, name := range a.Rules {
		if err == nil && line.Connection != nil {
			err = s.connection(name, *line.Connection)
		} else if err == nil {
			err = s.attempt(name, a)
		}
	}
	if err != nil {
		return fmt.Errorf("is one too many: %w", err)
	}
	return nil
}

// attempt counts an attempt by a rule of files or processes.
func (s *reading) attempt(name string, a judge.Attempt) error {
	if isIn(s.denials, name) {
		return nil
	}
	if !isIn(s.Policy.Rules, name) {
		s.Unknown++
		return nil
	}
	if s.rules[name] == nil {
		s.rules[name] = &Rule{Name: name, byPath: map[string]*Program{}}
	}
	return s.rules[name].count(a)
}

// isIn reports whether one of the rules has a name.
func isIn(rules []policy.Rule, name string) bool {
	return slices.ContainsFunc(rules, func(r policy.Rule) bool { return r.Name == name })
}

// count adds an attempt.
func (r *Rule) count(a judge.Attempt) error {
	one := r.byPath[a.Program]
	if one == nil {
		if len(r.Programs) == programsMax {
			return fmt.Errorf("rule %q reported more than %d programs, so it protects files that many programs write. Name fewer paths", r.Name, programsMax)
		}
		one = &Program{Path: a.Program, Example: a.Path}
		if a.Target != 0 {
			one.Example = fmt.Sprintf("process %d", a.Target)
		}
		r.byPath[a.Program] = one
		r.Programs = append(r.Programs, one)
	}
	one.Times++
	if a.Denied {
		one.denied++
	}
	if !slices.Contains(one.Operations, a.Operation) {
		one.Operations = append(one.Operations, a.Operation)
	}
	return nil
}

// trusted decides which programs a rule should trust, the most active first.
func (r *Rule) trusted(of policy.Rule) (more []policy.Program) {
	slices.SortStableFunc(r.Programs, func(a, b *Program) int { return b.Times - a.Times })
	for _, one := range r.Programs {
		if one.Not = one.obstacle(of); one.Not == "" {
			more = append(more, policy.Program{Path: one.Path})
		}
	}
	return more
}

// obstacle returns the reason why a rule should not trust a program; empty: there is none.
func (one *Program) obstacle(r policy.Rule) string {
	has := func(p policy.Program) bool { return p.Path == one.Path }
	switch info, err := os.Lstat(one.Path); {
	case r.IsUpdaters:
		return "it touched an updater: name it under updaters if it installs programs"
	case r.IsSelf:
		return "the guard's own process trusts process 1 alone"
	case slices.ContainsFunc(r.Trust.Programs, has):
		return "its path is trusted, but the process ran another file, had an environment that loads code, had a debugger, or had another user or cgroup than the rule names: if the program was upgraded, load the policy again"
	case slices.Contains(r.Trust.Interpreters, one.Path):
		return "it is an interpreter of the rule, and only trusted programs may start it"
	case one.denied == one.Times:
		return "it was denied in each case, and never audited"
	case policy.Interprets(one.Path):
		return "it runs any script: trust the program that starts it, with children: true, and list it in interpreters if it is started directly"
	case !path.IsAbs(one.Path):
		return "it has no path on this machine"
	case err != nil:
		return "its file is gone"
	case !info.Mode().IsRegular():
		return "it is not a regular file now"
	}
	return ""
}

// Print writes the reported attempts and the suggestion's decisions as text.
func (s *Suggestion) Print(w io.Writer) error {
	var b strings.Builder
	for _, r := range s.Rules {
		fmt.Fprintf(&b, "%s: %s did operations that the rule forbids\n", event.Printable(r.Name), value.Counted(len(r.Programs), "program"))
		for _, one := range r.Programs {
			verdict := "added to trust"
			if one.Not != "" {
				verdict = "not added: " + one.Not
			}
			fmt.Fprintf(&b, "  %s  %s, %s, first of %s\n    %s\n", event.Printable(one.Path), value.Counted(one.Times, "time"), event.Printable(strings.Join(one.Operations, ", ")),
				event.Printable(one.Example), verdict)
		}
	}
	for _, c := range s.Connections {
		c.print(&b)
	}
	if len(s.Rules)+len(s.Connections) == 0 {
		b.WriteString("The events name no rule of this policy, so the policy is unchanged.\n")
	}
	if s.Unknown > 0 {
		fmt.Fprintf(&b, "%s of rules that this policy does not have: left out\n", value.Counted(s.Unknown, "attempt"))
	}
	_, err := io.WriteString(w, b.String())
	return err
}
