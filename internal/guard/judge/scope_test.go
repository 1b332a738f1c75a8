package judge

import (
	"os"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

func TestScopeOfProcesses(t *testing.T) {
	deep := "/" + strings.Repeat("a/", policy.CgroupDepthMax) + "b"
	if _, err := scopeOfProcesses(policy.Rule{Cgroup: deep}); err == nil || !strings.Contains(err.Error(), "in the cgroup "+deep) {
		t.Error(err)
	}
	if n, err := scopeOfProcesses(policy.Rule{Program: "/a"}); err != nil || n != (Scope{}) {
		t.Errorf("a rule without a cgroup: %+v %v", n, err)
	}
	own, err := CgroupOf(os.Getpid())
	if err != nil {
		t.Skip(err)
	}
	for path, is := range map[string]bool{own: own != "/", own + "x": false, "/a/b/c/no-such-group": false} {
		if path == "/" {
			continue // no rule can name the root
		}
		n, err := scopeOfProcesses(policy.Rule{Cgroup: path})
		if err != nil {
			t.Fatal(path, err)
		}
		if got := (&Scopes{3: n}).protect(os.Getpid()); got != map[bool]uint64{true: 1 << 3}[is] {
			t.Errorf("%s protects a process of %s by %b", path, own, got)
		}
	}
}
