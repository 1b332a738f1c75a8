package agent

import (
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Connections are denied while the policy says so, each is reported, and a rule can be switched off; the rules in force
// outlast the agent.
func TestConnections(t *testing.T) {
	bash, err := filepath.EvalSymlinks("/bin/bash")
	if err != nil {
		t.Fatal(err)
	}
	var told []connect.Attempt
	p := policy.Policy{Connections: []policy.Connection{{Name: "no-discard", Program: bash, Deny: []string{policy.Connect}, To: []policy.Target{{First: 9, Last: 9}}, Mode: policy.Deny}}}
	var root string
	s := newSandboxWith(t, p, func(of *sandbox, o *Options) {
		root = pins(t)
		o.Root = root
		o.Tell = func(l Line) error {
			if l.Connection != nil {
				told = append(told, *l.Connection)
				return nil
			}
			return of.tell(l)
		}
	})
	connects := func(isDenied bool) {
		t.Helper()
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		c := exec.Command(bash, "-c", "exec 3<>/dev/tcp/127.0.0.1/9")
		c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(s.group.Fd()), Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		said, err := c.CombinedOutput()
		if is := strings.Contains(string(said), "Operation not permitted"); err == nil || is != isDenied {
			t.Errorf("denied %v, want %v: %v %s", is, isDenied, err, said)
		}
	}
	feature := func() Feature {
		all := s.status().Features
		return all[slices.IndexFunc(all, func(f Feature) bool { return f.Name == ConnectionsName })]
	}
	connects(true)
	if f := feature(); !f.On || f.Rules != 1 || len(f.Names) != 1 {
		t.Errorf("%+v", f)
	}
	if _, err := s.agent.Switch(ConnectionsName+"/no-discard", false, By{}); err != nil {
		t.Fatal(err)
	}
	connects(false)
	if f := feature(); f.On {
		t.Errorf("%+v", f)
	}
	if status, err := connect.Look(root); status != nil || err != nil {
		t.Errorf("it is switched off, and there is %+v %v", status, err)
	}
	if _, err := s.agent.Switch(ConnectionsName+"/no-discard", true, By{}); err != nil {
		t.Fatal(err)
	}
	connects(true)

	wrong := p
	wrong.Connections = append(slices.Clone(p.Connections), policy.Connection{Name: "x", Program: "/nowhere/app", Deny: []string{policy.Bind}, Mode: policy.Deny})
	if err := s.agent.Apply(wrong); err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("a program that is not there: %v", err)
	}
	connects(true)
	s.close()
	if len(told) != 3 || !told[0].Denied || told[0].Address != "127.0.0.1:9" || told[0].Program != bash {
		t.Errorf("%+v", told)
	}
	connects(true)
	if was, err := connect.Stop(root); !was || err != nil {
		t.Errorf("%v %v", was, err)
	}
	connects(false)
}
