package policy

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
)

// YAML returns a file of the policy, from which Load reads the same policy.
func (p Policy) YAML() string {
	var b strings.Builder
	b.WriteString("guard:\n")
	if p.IsDegraded {
		b.WriteString("  degraded: allow\n")
	}
	section := ""
	for _, r := range p.Rules {
		if r.IsUpdaters {
			programs := make([]string, len(r.Trust.Programs))
			for i, program := range r.Trust.Programs {
				programs[i] = program.Path
			}
			fmt.Fprintf(&b, "  updaters: %s\n", list(programs))
			continue
		}
		if r.IsSelf {
			b.WriteString("  self: true\n")
			continue
		}
		key := "protect"
		if r.IsOfProcesses() {
			key = "processes"
		}
		if key != section {
			fmt.Fprintf(&b, "  %s:\n", key)
			section = key
		}
		fmt.Fprintf(&b, "    - name: %s\n", quote(r.Name))
		for _, one := range []struct{ key, value string }{
			{"paths", list(r.Paths)}, {"program", r.Program}, {"pid-file", r.PIDFile}, {"cgroup", r.Cgroup},
		} {
			if one.key != "paths" {
				one.value = quote(one.value)
			}
			if one.value != `""` && one.value != "[]" {
				fmt.Fprintf(&b, "      %s: %s\n", one.key, one.value)
			}
		}
		fmt.Fprintf(&b, "      deny: %s\n", list(r.Deny))
		if trust := r.Trust.yaml(); trust != "" {
			fmt.Fprintf(&b, "      trust: {%s}\n", trust)
		}
		fmt.Fprintf(&b, "      mode: %s\n", r.Mode)
	}
	if len(p.Connections) > 0 {
		b.WriteString("  connections:\n")
	}
	for _, c := range p.Connections {
		b.WriteString(c.yaml())
	}
	b.WriteString(p.Detection.yaml())
	if len(p.Decoys) > 0 {
		b.WriteString("  decoys:\n")
	}
	for _, d := range p.Decoys {
		b.WriteString(d.yaml())
	}
	return b.String()
}

// yaml returns the text between the braces.
func (t Trust) yaml() string {
	var parts, programs []string
	for _, program := range t.Programs {
		path := program.Path
		if program.SHA256 != "" {
			path += digestMark + program.SHA256
		}
		programs = append(programs, path)
	}
	if len(programs) > 0 {
		parts = append(parts, "programs: "+list(programs))
	}
	if t.Children {
		parts = append(parts, "children: true")
	}
	if len(t.Interpreters) > 0 {
		parts = append(parts, "interpreters: "+list(t.Interpreters))
	}
	for _, one := range []struct{ key, value string }{{"user", t.User}, {"cgroup", t.Cgroup}} {
		if one.value != "" {
			parts = append(parts, one.key+": "+quote(one.value))
		}
	}
	return strings.Join(parts, ", ")
}

func list(words []string) string {
	quoted := make([]string, len(words))
	for i, word := range words {
		quoted[i] = quote(word)
	}
	return "[" + strings.Join(quoted, ", ") + "]"
}

// plain matches texts that YAML needs no quotes for: paths, and the words of the policy.
var plain = regexp.MustCompile(`^(/[A-Za-z0-9/._@-]*|write|create|delete|rename|link|chmod|mount|read|exec|kill|ptrace|memory|move|connect|bind|listen|accept|raw)$`)

// quote writes a text as YAML: JSON's strings are YAML's too.
func quote(text string) string {
	if plain.MatchString(text) {
		return text
	}
	var b strings.Builder
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(text) // a string can be encoded
	return strings.TrimSuffix(b.String(), "\n")
}
