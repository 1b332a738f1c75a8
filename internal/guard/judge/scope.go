package judge

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Scope is the user and the cgroup to which a rule is limited.
type Scope struct {
	HasUser bool
	User    uint32
	Cgroup  string // as /proc/PID/cgroup has it; empty: all
}

// Scopes has a scope for each rule: the user and cgroup as which and in which the rule trusts its programs, or the cgroup whose processes it
// protects.
type Scopes [policy.RulesMax]Scope

// scopeOfTrust returns the user and the cgroup to which the trust is limited. The user must exist on this machine; the cgroup need not.
func scopeOfTrust(t policy.Trust) (s Scope, err error) {
	if t.User != "" {
		s.HasUser = true
		if s.User, err = numberOf(t.User); err != nil {
			return s, err
		}
	}
	s.Cgroup, err = cgroupThatCounts(t.Cgroup)
	return s, err
}

// scopeOfProcesses returns the cgroup whose processes a rule protects; zero: the rule names none.
func scopeOfProcesses(r policy.Rule) (s Scope, err error) {
	s.Cgroup, err = cgroupThatCounts(r.Cgroup)
	return s, err
}

// cgroupThatCounts refuses a cgroup to which no process can be compared.
func cgroupThatCounts(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	if text, err := os.ReadFile("/proc/self/cgroup"); err != nil || !hasSecond(string(text)) {
		return "", errors.Join(fmt.Errorf("find processes in the cgroup %s: this kernel has no cgroup v2. Leave cgroup out", path), err)
	}
	if depth := len(CgroupNames(path)); depth > policy.CgroupDepthMax {
		return "", fmt.Errorf("find processes in the cgroup %s: it is %d deep, and at most %d are compared", path, depth, policy.CgroupDepthMax)
	}
	return path, nil
}

// CgroupNames returns the parts of a cgroup's path: its own name is the last one.
func CgroupNames(path string) []string { return strings.Split(strings.TrimPrefix(path, "/"), "/") }

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

// Here returns the rules that trust a process where it is now, of all rules that trust its program, as trust_here of bpf/guard/narrow.h.
func (s *Scopes) Here(trusts uint64, id int) uint64 {
	for i := range s {
		if trusts>>i&1 == 1 && s.unmet(i, id) != "" {
			trusts &^= 1 << i
		}
	}
	return trusts
}

// protect returns the rules that protect a process by its cgroup, as groups_of in bpf/guard/group.h.
func (s *Scopes) protect(id int) (rules uint64) {
	for i := range s {
		if s[i].Cgroup != "" && s.unmet(i, id) == "" {
			rules |= 1 << i
		}
	}
	return rules
}

// unmet returns the reason why a rule does not trust a process although it trusts its program; empty: it does.
func (s *Scopes) unmet(rule, id int) string {
	want := s[rule]
	if want.HasUser {
		switch ids, err := usersOf(id); {
		case err != nil:
			return fmt.Sprintf("shunt cannot read its user: %v", err)
		case ids != [2]uint32{want.User, want.User}:
			return fmt.Sprintf("the rule trusts its program as user %d, but its real user is %d and its effective user %d", want.User, ids[0], ids[1])
		}
	}
	if want.Cgroup != "" {
		switch have, err := CgroupOf(id); {
		case err != nil:
			return fmt.Sprintf("shunt cannot read its cgroup: %v", err)
		case have != want.Cgroup && !strings.HasPrefix(have, want.Cgroup+"/"):
			return fmt.Sprintf("the rule trusts its program in cgroup %s, but it is in %s", want.Cgroup, have)
		}
	}
	return ""
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

// CgroupOf returns a process's cgroup in the second hierarchy, as this cgroup namespace names it.
func CgroupOf(id int) (string, error) {
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
