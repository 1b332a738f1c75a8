package rule

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// The actions of a rule that holds.
const (
	Log   = "log"   // tell
	Alert = "alert" // tell, and count it as an alert
	Kill  = "kill"  // end the process
	Stop  = "stop"  // stop it (SIGSTOP), for a person to look at
	Deny  = "deny"  // have the kernel refuse it beforehand, and tell it as an alert
)

// Severities in rising order.
var Severities = []string{"low", "medium", "high", "critical"}

// Rule is a condition, and the action when it holds.
type Rule struct {
	Name     string
	Doc      string   // the events that it finds, in a few words
	On       []string // types of events
	If       string
	Severity string
	Mitre    []string // techniques
	Action   string
	Tell     string // text with fields in braces; empty: the event's own words
	IsOff    bool   // of built-in rules: it works only if the file enables it
	Noise    string // of built-in rules: the harmless acts that it also finds, or ""

	condition *Expression
	parts     []part
}

// part is a piece of a rule's message.
type part struct {
	plain string
	field *Field // nil: the plain text
}

// Prepare compiles the condition and the message. The error is a *Problem of one of them.
func (r *Rule) Prepare() (inText bool, err error) {
	if r.condition, err = Compile(r.If, r.On); err != nil {
		return false, err
	}
	r.parts, err = compileText(r.Tell, r.On)
	return true, err
}

func compileText(source string, of []string) (parts []part, err error) {
	rest, at := source, 0
	for {
		plain, after, has := strings.Cut(rest, "{")
		if plain != "" {
			parts = append(parts, part{plain: plain})
		}
		if !has {
			return parts, nil
		}
		at += len(plain)
		name, next, closed := strings.Cut(after, "}")
		if !closed {
			return nil, problemAt(source, at, "the brace has no end", "write {process.program}")
		}
		i := slices.IndexFunc(Fields, func(f Field) bool { return f.Name == name })
		if i < 0 {
			return nil, problemAt(source, at, fmt.Sprintf("there is no field %q", name), suggest(name))
		}
		if f := &Fields[i]; f.kind == processes {
			return nil, problemAt(source, at, f.Name+" is a list, not a text", "use parent.program")
		}
		if f := &Fields[i]; f.Of != nil && !slices.ContainsFunc(f.Of, func(one string) bool { return slices.Contains(of, one) }) {
			return nil, problemAt(source, at, name+" belongs to other events than the rule's", "use another field")
		}
		parts = append(parts, part{field: &Fields[i]})
		at += len(name) + 2
		rest = next
	}
}

// Holds reports whether the rule holds for an event.
func (r *Rule) Holds(e *Event) bool { return slices.Contains(r.On, e.Type) && r.condition.Holds(e) }

// Text returns the rule's message about an event.
func (r *Rule) Text(e *Event) string {
	var b strings.Builder
	for _, p := range r.parts {
		switch value := p.value(e).(type) {
		case []string:
			b.WriteString(strings.Join(value, " "))
		default:
			fmt.Fprint(&b, value)
		}
	}
	return cmp.Or(b.String(), r.Doc)
}

func (p part) value(e *Event) any {
	if p.field == nil {
		return p.plain
	}
	return p.field.Value(e)
}
