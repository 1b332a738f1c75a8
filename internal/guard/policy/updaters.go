package policy

import (
	"slices"

	"github.com/shunt-lb/shunt/internal/config"
)

// updatersRule is the name of the updaters' rule in the status and in events.
const updatersRule = "updaters"

// addUpdaters adds the rule that protects the programs that renew others, after the rules that a user wrote. It denies
// if one of these rules denies.
func (g *guardEntry) addUpdaters(rules []Rule, add func(config.Text, Rule), faults *config.Faults) {
	if !g.Updaters.Set {
		return
	}
	r := Rule{Name: updatersRule, IsUpdaters: true, Mode: Audit, At: g.Updaters.At.String()}
	if slices.ContainsFunc(rules, func(r Rule) bool { return r.Mode == Deny }) {
		r.Mode = Deny
	}
	for _, item := range g.Updaters.Items {
		if Interprets(item.Value) {
			faults.Errorf(item.Mark, "name the package manager's own program", "%s runs any script: every script could make any file a trusted program", item.Value)
		}
	}
	r.Trust.Programs = Programs(paths(g.Updaters.Items, faults)...)
	if !slices.ContainsFunc(rules, Rule.isRenewed) {
		faults.Warnf(g.Updaters.Mark, "leave it out", "no rule has programs that updaters could renew")
	}
	add(config.Text{Mark: g.Updaters.Mark}, r)
}

// isRenewed reports whether a rule has programs that may be replaced, and are then trusted, protected or denied something as before: programs
// with a digest may not.
func (r Rule) isRenewed() bool {
	return (len(r.Trust.Programs) > 0 || r.Program != "" || len(r.By) > 0) && !slices.ContainsFunc(r.Trust.Programs, func(p Program) bool { return p.SHA256 != "" })
}

// Renewed returns the updaters' rule, and the rules whose programs they renew, as masks of positions in a list; the
// second includes the first. 0: there is none.
func Renewed(rules []Rule) (by, renewed uint64) {
	for i, r := range rules {
		if r.IsUpdaters {
			by |= 1 << i
		}
		if r.isRenewed() {
			renewed |= 1 << i
		}
	}
	if by == 0 {
		return 0, 0
	}
	return by, renewed
}
