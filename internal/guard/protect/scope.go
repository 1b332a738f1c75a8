package protect

import (
	"fmt"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// scopeMaps are the names of the kernel's maps of scopes: the mask of the rules that have a scope, and the scope of each rule.
type scopeMaps struct{ mask, each string }

var (
	trustScopes   = scopeMaps{guardMapShG_narrowed, guardMapShG_narrows} // the users and cgroups as which programs are trusted
	processScopes = scopeMaps{guardMapShG_grouped, guardMapShG_groups}   // the cgroups whose processes are protected
)

// narrowOf returns a scope as the kernel has it.
func narrowOf(s judge.Scope) (n guardGuardNarrow) {
	if s.HasUser {
		n.HasUser, n.User = 1, s.User
	}
	if s.Cgroup != "" {
		for i, name := range judge.CgroupNames(s.Cgroup) {
			put(n.Names[i][:], name)
			n.Depth++
		}
	}
	return n
}

// scope is the inverse of narrowOf.
func (n guardGuardNarrow) scope() judge.Scope {
	s := judge.Scope{HasUser: n.HasUser != 0, User: n.User}
	var path strings.Builder
	for i := range min(int(n.Depth), len(n.Names)) {
		path.WriteString("/" + event.Text(n.Names[i][:]))
	}
	s.Cgroup = path.String()
	return s
}

// maskOf reads the rules of a side that have a scope.
func maskOf(maps map[string]*ebpf.Map, side uint32, from scopeMaps) (rules uint64, err error) {
	if err := maps[from.mask].Lookup(side, &rules); err != nil {
		return 0, fmt.Errorf("read the rules with user or cgroup: %w", err)
	}
	return rules, nil
}

// writeScopes writes the next generation's side, and returns the rules that have a scope.
func writeScopes(scopes *judge.Scopes, maps map[string]*ebpf.Map, side uint32, to scopeMaps) (mask uint64, err error) {
	for i := range scopes {
		n := narrowOf(scopes[i])
		if n != (guardGuardNarrow{}) {
			mask |= 1 << i
		}
		if err := maps[to.each].Put(side*policy.RulesMax+uint32(i), &n); err != nil {
			return 0, fmt.Errorf("write the users and cgroups of rules: %w", err)
		}
	}
	if err := maps[to.mask].Put(side, &mask); err != nil {
		return 0, fmt.Errorf("write the rules with user or cgroup: %w", err)
	}
	return mask, nil
}

// readScopes reads a side.
func readScopes(maps map[string]*ebpf.Map, side uint32, from scopeMaps) (s judge.Scopes, err error) {
	for i := range s {
		var n guardGuardNarrow
		if err := maps[from.each].Lookup(side*policy.RulesMax+uint32(i), &n); err != nil {
			return s, fmt.Errorf("read the users and cgroups of rules: %w", err)
		}
		s[i] = n.scope()
	}
	return s, nil
}
