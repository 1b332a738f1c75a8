package protect

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// narrows has a scope for each rule, by the number of the rule: the user and cgroup as which and in which the rule trusts its programs, or the
// cgroup whose processes it protects.
type narrows [policy.RulesMax]guardGuardNarrow

// scopeMaps are the names of the kernel's maps of scopes: the mask of the rules that have a scope, and the scope of each rule.
type scopeMaps struct{ mask, each string }

var (
	trustScopes   = scopeMaps{guardMapShG_narrowed, guardMapShG_narrows} // the users and cgroups as which programs are trusted
	processScopes = scopeMaps{guardMapShG_grouped, guardMapShG_groups}   // the cgroups whose processes are protected
)

// narrowOf returns the user and the cgroup to which the trust is limited. The user must exist on this machine; the cgroup need not.
func narrowOf(t policy.Trust) (n guardGuardNarrow, err error) {
	if t.User != "" {
		n.HasUser = 1
		if n.User, err = numberOf(t.User); err != nil {
			return n, err
		}
	}
	err = n.setCgroup(t.Cgroup)
	return n, err
}

// groupOf returns the cgroup whose processes a rule protects; zero: the rule names none.
func groupOf(r policy.Rule) (n guardGuardNarrow, err error) {
	err = n.setCgroup(r.Cgroup)
	return n, err
}

// setCgroup writes the names of a cgroup's path; none for the empty path.
func (n *guardGuardNarrow) setCgroup(path string) error {
	if path == "" {
		return nil
	}
	if text, err := os.ReadFile("/proc/self/cgroup"); err != nil || !hasSecond(string(text)) {
		return errors.Join(fmt.Errorf("find processes in the cgroup %s: this kernel has no cgroup v2. Leave cgroup out", path), err)
	}
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	if len(parts) > len(n.Names) {
		return fmt.Errorf("find processes in the cgroup %s: it is %d deep, and at most %d are compared", path, len(parts), len(n.Names))
	}
	n.Depth = uint32(len(parts))
	for i, part := range parts {
		put(n.Names[i][:], part)
	}
	return nil
}

// numberOf returns the number of a user: of a name in /etc/passwd, or the number itself.
func numberOf(name string) (uint32, error) {
	if number, err := strconv.ParseUint(name, 10, 32); err == nil {
		return uint32(number), nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return 0, fmt.Errorf("trust only the user %s: %w. Write the number if it is not in /etc/passwd", name, err)
	}
	number, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("trust only the user %s: its number is %q", name, u.Uid)
	}
	return uint32(number), nil
}

// secondHierarchy begins the line of the second hierarchy in /proc/PID/cgroup (cgroups(7)).
const secondHierarchy = "0::"

func hasSecond(text string) bool {
	return strings.HasPrefix("\n"+text, "\n"+secondHierarchy) || strings.Contains(text, "\n"+secondHierarchy)
}

// mask returns the rules that have a scope.
func (n *narrows) mask() (rules uint64) {
	for i := range n {
		if n[i] != (guardGuardNarrow{}) {
			rules |= 1 << i
		}
	}
	return rules
}

// maskOf reads the rules of a side that have a scope.
func maskOf(maps map[string]*ebpf.Map, side uint32, from scopeMaps) (rules uint64, err error) {
	if err := maps[from.mask].Lookup(side, &rules); err != nil {
		return 0, fmt.Errorf("read the rules with user or cgroup: %w", err)
	}
	return rules, nil
}

// write writes the next generation's side.
func (n *narrows) write(maps map[string]*ebpf.Map, side uint32, to scopeMaps) error {
	for i := range n {
		if err := maps[to.each].Put(side*policy.RulesMax+uint32(i), &n[i]); err != nil {
			return fmt.Errorf("write the users and cgroups of rules: %w", err)
		}
	}
	mask := n.mask()
	if err := maps[to.mask].Put(side, &mask); err != nil {
		return fmt.Errorf("write the rules with user or cgroup: %w", err)
	}
	return nil
}

// readNarrows reads a side.
func readNarrows(maps map[string]*ebpf.Map, side uint32, from scopeMaps) (n narrows, err error) {
	for i := range n {
		if err := maps[from.each].Lookup(side*policy.RulesMax+uint32(i), &n[i]); err != nil {
			return n, fmt.Errorf("read the users and cgroups of rules: %w", err)
		}
	}
	return n, nil
}

// here returns the rules that trust the process where it is now, of all rules that trust its program, as trust_here of
// bpf/guard/narrow.h.
func (n *narrows) here(trusts uint64, id int) uint64 {
	for i := range n {
		if trusts>>i&1 == 1 && n.unmet(i, id) != "" {
			trusts &^= 1 << i
		}
	}
	return trusts
}

// protect returns the rules that protect a process by its cgroup, as groups_of in bpf/guard/group.h.
func (n *narrows) protect(id int) (rules uint64) {
	for i := range n {
		if n[i].Depth > 0 && n.unmet(i, id) == "" {
			rules |= 1 << i
		}
	}
	return rules
}

// unmet returns the reason why a rule does not trust a process although it trusts its program; empty: it does.
func (n *narrows) unmet(rule, id int) string {
	want := n[rule]
	if want.HasUser != 0 {
		switch ids, err := usersOf(id); {
		case err != nil:
			return fmt.Sprintf("shunt cannot read its user: %v", err)
		case ids != [2]uint32{want.User, want.User}:
			return fmt.Sprintf("the rule trusts its program as user %d, but its real user is %d and its effective user %d", want.User, ids[0], ids[1])
		}
	}
	if want.Depth > 0 {
		wanted := want.cgroup()
		switch have, err := cgroupOf(id); {
		case err != nil:
			return fmt.Sprintf("shunt cannot read its cgroup: %v", err)
		case have != wanted && !strings.HasPrefix(have, wanted+"/"):
			return fmt.Sprintf("the rule trusts its program in cgroup %s, but it is in %s", wanted, have)
		}
	}
	return ""
}

// cgroup returns the path.
func (n guardGuardNarrow) cgroup() string {
	path := ""
	for i := range min(int(n.Depth), len(n.Names)) {
		path += "/" + event.Text(n.Names[i][:])
	}
	return path
}

// usersOf returns a process's real and effective users (proc_pid_status(5)), as this user namespace numbers them.
func usersOf(id int) (ids [2]uint32, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", id))
	if err != nil {
		return ids, err
	}
	for line := range strings.Lines(string(text)) {
		if numbers, is := strings.CutPrefix(line, "Uid:"); is {
			_, err := fmt.Sscan(numbers, &ids[0], &ids[1])
			return ids, err
		}
	}
	return ids, errors.New("its status names no user")
}

// cgroupOf returns a process's cgroup in the second hierarchy, as this cgroup namespace names it.
func cgroupOf(id int) (string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", id))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if path, is := strings.CutPrefix(line, secondHierarchy); is {
			return strings.TrimSuffix(path, "\n"), nil
		}
	}
	return "", errors.New("it is in no cgroup of cgroup v2")
}
