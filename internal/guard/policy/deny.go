package policy

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// The operations that the kernel refuses for a rule of detection with the action deny. Rules of files have Read and Exec, too.
const (
	Read     = "read" // reading contents
	Exec     = "exec" // executing, and mapping as code
	AnyMount = "any mount"
	Module   = "module"
	BPF      = "bpf"
	AnyTrace = "any trace"
)

// decided has the types of events before which the kernel asks, each with the operation that it then refuses. The conditions
// of open and exec name the file.
var decided = map[string]string{rule.Open: "", rule.Exec: Exec, rule.Mount: AnyMount, rule.Module: Module, rule.BPF: BPF, rule.Ptrace: AnyTrace}

// Denials returns the rules of detection with the action deny, as the kernel enforces them.
func (p Policy) Denials() []Rule {
	if p.IsDenialOff {
		return nil
	}
	return p.Detection.Denials
}

// Enforced returns all rules that the kernel enforces.
func (p Policy) Enforced() []Rule { return slices.Concat(p.Rules, p.Denials()) }

// WithoutDetecting returns the section without one of the file's own rules.
func (d Detection) WithoutDetecting(name string) Detection {
	d.Rules = slices.DeleteFunc(slices.Clone(d.Rules), func(r rule.Rule) bool { return r.Name == name })
	d.Denials = slices.DeleteFunc(slices.Clone(d.Denials), func(r Rule) bool { return r.Name == name })
	d.Disable = append(slices.Clone(d.Disable), name)
	return d
}

// Worse returns the worse of two severities; "" is none.
func Worse(a, b string) string {
	if slices.Index(rule.Severities, b) > slices.Index(rule.Severities, a) {
		return b
	}
	return a
}

// denial returns the operation that the kernel refuses for a rule of detection. ok is false if the kernel cannot decide before the operation;
// that is a fault, which names the part of the rule that is to blame.
func (e *detectRule) denial(r rule.Rule, faults *config.Faults) (d Rule, ok bool) {
	d = Rule{Name: r.Name, Mode: Deny, At: e.At.String(), IsDetected: true, Severity: r.Severity, Mitre: r.Mitre}
	ok = true
	refuse := func(at config.Mark, suggestion, format string, args ...any) {
		faults.Errorf(at, suggestion, "action deny: %s", fmt.Sprintf(format, args...))
		ok = false
	}
	for _, word := range e.On.Items {
		op, is := decided[word.Value]
		switch {
		case !is:
			refuse(word.Mark, instead[word.Value], "the kernel has no check for %s before it happens", word.Value)
		case len(r.On) > 1 && (word.Value == rule.Open || word.Value == rule.Exec):
			refuse(word.Mark, "write a rule of its own for "+word.Value, "a rule on %s can deny only if it is on that type alone, and this rule is on more", word.Value)
		case op != "" && !slices.Contains(d.Deny, op):
			d.Deny = append(d.Deny, op)
		}
	}
	if !ok {
		return d, false
	}
	d.Deny = append(d.Deny, opens(r)...)
	for _, t := range rule.Terms(r.If) {
		if !e.term(&d, r, t, faults) {
			column := fmt.Sprintf("the condition, column %d: %s cannot be decided before the operation", t.Column, t.Source)
			refuse(e.If.Mark, undecided(r, t), "%s", column)
		}
	}
	field := map[string]string{rule.Open: "file.path", rule.Exec: "process.program"}[r.On[0]]
	if !ok || field == "" || len(d.Paths) > 0 {
		return d, ok
	}
	isNamed := func(t rule.Term) bool { return t.Field == field && t.Values != nil && !t.Not }
	if !slices.ContainsFunc(rule.Terms(r.If), isNamed) { // otherwise the path is faulty already
		refuse(e.If.Mark, fmt.Sprintf("add %s == '/a/file'", field), "the condition names no file: the kernel decides by the file's inode")
	}
	return d, false
}

// opens returns the operations of a rule on open, which file.write chooses from.
func opens(r rule.Rule) []string {
	if r.On[0] != rule.Open {
		return nil
	}
	reads, writes := rule.Opens(rule.Terms(r.If))
	var all []string
	if reads {
		all = append(all, Read)
	}
	if writes {
		all = append(all, Write)
	}
	return all
}

// term adds a part of the condition to the rule; false: it cannot be decided beforehand.
func (e *detectRule) term(d *Rule, r rule.Rule, t rule.Term, faults *config.Faults) bool {
	named := func() []string {
		list := make([]config.Phrase, 0, len(t.Values))
		for _, value := range t.Values {
			list = append(list, config.Phrase{Mark: e.If.Mark, Value: value})
		}
		return paths(list, faults)
	}
	switch {
	case t.Field == "file.write" && t.Values == nil:
		return len(d.Deny) > 0 // an empty list means that the file would have to be open for both
	case t.Values == nil:
		return false
	case r.On[0] == rule.Exec && t.Field == "process.program", r.On[0] == rule.Open && t.Field == "file.path":
		if t.Not || len(d.Paths) > 0 {
			return false
		}
		d.Paths = named()
		return true
	case t.Field == "process.program" && t.Not && len(d.By) == 0:
		d.Trust.Programs = append(d.Trust.Programs, Programs(named()...)...)
		return true
	case t.Field == "process.program" && !t.Not && len(d.By)+len(d.Trust.Programs) == 0:
		d.By = named()
		return true
	}
	return false
}

// instead has the advice for events that the kernel does not ask about, or could not decide by the rule.
var instead = map[string]string{
	rule.Connect: "write a rule of connections, or use action: kill",
	rule.Accept:  "write a rule of connections, or use action: kill",
	rule.Dup:     "use action: kill",
	rule.SetUID:  "use action: kill, or remove the file's set-user-ID bit",
	rule.MemFD:   "use action: kill",
}

// undecided returns the advice for a part of a condition that cannot be decided.
func undecided(r rule.Rule, t rule.Term) string {
	group, _, _ := strings.Cut(t.Field, ".")
	switch {
	case strings.Contains(t.Source, "||"):
		return "write a rule for each side, or in [...], or use action: kill"
	case t.Field == "process.name" || t.Field == "process.comm" || t.Field == "file.name" || t.Field == "exec.path":
		return fmt.Sprintf("any program can have this name: write %s == '/the/whole/path', or use action: kill", map[bool]string{true: "file.path", false: "process.program"}[group == "file"])
	case r.On[0] == rule.Exec && t.Not && t.Field == "process.program", r.On[0] == rule.Open && t.Not && t.Field == "file.path":
		return "name the files that are denied, use action: kill, or protect the folder (protect:)"
	case r.On[0] == rule.Open:
		return "write it with file.path ==, file.write and process.program ==, use action: kill, or protect the folder (protect:)"
	case r.On[0] == rule.Exec:
		return "write it with process.program ==, or use action: kill"
	}
	return "write it with process.program ==, !=, in, or use action: kill"
}
