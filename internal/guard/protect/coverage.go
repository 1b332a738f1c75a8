package protect

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// held are the operations that opens of files can be refused for, each with what of it passes all the same. The guide's table says more.
var held = map[string]string{
	policy.Write: "truncating by path, descriptors and mappings from before pass",
	policy.Read:  "descriptors and mappings from before pass",
	policy.Exec:  "mapping as code passes",
}

// Missing are the operations of rules that are not denied where opens wait and nothing else does: without BPF LSM.
func Missing(rules []policy.Rule) (all []policy.Gap) {
	add := func(r policy.Rule, operation, why string) {
		all = append(all, policy.Gap{Rule: r.Name, Operation: operation, Why: why, Denies: r.Mode == policy.Deny})
	}
	for _, r := range rules {
		if r.IsUpdaters {
			add(r, "upgrade", "a program that an updater replaces is trusted when the policy is loaded again")
		}
		for _, operation := range r.Deny {
			if held[operation] == "" {
				add(r, operation, "no event of fanotify waits for an answer to it")
			}
		}
	}
	return all
}

// Held are the operations of rules that are denied where opens wait, each with what of it passes all the same.
func Held(rules []policy.Rule) (all []string) {
	for _, operation := range []string{policy.Write, policy.Read, policy.Exec} {
		if slices.ContainsFunc(rules, func(r policy.Rule) bool { return slices.Contains(r.Deny, operation) }) {
			all = append(all, fmt.Sprintf("%s (%s)", operation, held[operation]))
		}
	}
	return all
}

// NotEnforced is a line about operations that are not denied.
func NotEnforced(gaps []policy.Gap) string {
	if len(gaps) == 0 {
		return "OPENS ONLY: this kernel has no BPF LSM, and the policy is enforced for opens of files alone."
	}
	var texts []string
	for i, g := range gaps {
		if i > 0 && gaps[i-1].Rule == g.Rule {
			texts[len(texts)-1] += ", " + g.Operation
			continue
		}
		texts = append(texts, fmt.Sprintf("rule %s: %s", g.Rule, g.Operation))
	}
	return "NOT ENFORCED on this kernel, which has no BPF LSM: " + strings.Join(texts, "; ") + "."
}
