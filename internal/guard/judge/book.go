package judge

import (
	"os"
	"path/filepath"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Book has the rules by which an operation is judged, and says where the label of a file and the standing of a process come from: the kernel's maps, or
// a Reading and /proc.
type Book struct {
	Names    [policy.RulesMax]string
	Masks    map[string]Masks                    // by operation
	Children uint64                              // rules that trust children
	Scopes   Scopes                              // as which user and in which cgroup rules trust programs
	Groups   Scopes                              // the cgroups whose processes rules protect
	Moved    bool                                // a file without a label of its own is under the rules of the folders above it
	Label    func(path string) (Marks, error)    // of the file that a path leads to
	Has      func(process int) (Standing, error) // also zero if it has ended
}

func (b *Book) words(mask uint64) []string {
	words := []string{}
	for i, name := range b.Names {
		if mask>>i&1 == 1 {
			words = append(words, name)
		}
	}
	return words
}

// only returns the rules that deny something only to certain processes, instead of protecting these.
func (b *Book) only() (mask uint64) {
	for _, m := range b.Masks {
		mask |= m.Only
	}
	return mask
}

// Forbids returns the rules that forbid an operation.
func (b *Book) Forbids(operation string) uint64 {
	return b.Masks[operation].Denied | b.Masks[operation].Audited
}

// under returns the label of the file that a path leads to. If it has none, and folders were moved into protected ones, the label has the rules of
// the nearest folder above with rules, as in rules_above of bpf/guard/label.h.
func (b *Book) under(path string) (Marks, error) {
	own, err := b.Label(path)
	if err != nil || own.Rules != 0 || !b.Moved {
		return own, err
	}
	for at := filepath.Dir(path); ; at = filepath.Dir(at) {
		up, err := b.Label(at)
		if err != nil || up.Rules != 0 || at == "/" {
			own.Rules = up.Rules
			return own, err
		}
	}
}

// answers returns the answers for all operations on a file.
func (b *Book) answers(o Object, own, folder Marks, has Standing) []Answer {
	in := own.Rules // the folder for a new name
	info, err := os.Stat(o.Path)
	isFolder := err == nil && info.IsDir()
	if !o.Exists {
		in = folder.Rules
	}
	about := map[string]uint64{
		policy.Write: own.Rules, policy.Create: in, policy.Delete: own.Rules | folder.Rules, policy.Rename: own.Rules | own.Above | folder.Rules,
		policy.Link: own.Rules, policy.Chmod: own.Rules, policy.Mount: own.Rules | own.Above,
	}
	all := make([]Answer, 0, len(policy.Operations)+1)
	for _, word := range policy.Operations {
		a := b.Answer(word, about[word], has)
		if word == policy.Create && o.Exists && !isFolder || word == policy.Write && isFolder || word != policy.Create && !o.Exists {
			a.Verdict, a.Rules, a.Trusted = NoObject, []string{}, []string{}
		}
		all = append(all, a)
	}
	for _, word := range []string{policy.Read, policy.Exec} { // few rules have these operations
		if own.Rules&b.Forbids(word) != 0 {
			all = append(all, b.Answer(word, own.Rules, has))
		}
	}
	if own.Trusts != 0 {
		all = append(all, b.Answer(WriteProgram, own.Trusts, has))
	}
	return all
}

// Answer decides as attempt_judge of bpf/guard/judge.h.
func (b *Book) Answer(operation string, rules uint64, has Standing) Answer {
	masks := b.Masks[operation]
	forbids := rules & (masks.Denied | masks.Audited)
	forbids &= ^masks.Only | has.Guards
	left := forbids &^ has.Trusts
	a := Answer{Operation: operation, Verdict: Allowed, Rules: b.words(left), Trusted: b.words(forbids & has.Trusts)}
	switch denied := left & masks.Denied; {
	case denied != 0:
		a.Verdict, a.Rules = Denied, b.words(denied)
	case left != 0:
		a.Verdict = Audited
	}
	return a
}
