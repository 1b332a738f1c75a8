package net

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// openEverywhere is the number of open flows of services, of their backends and of all backends, which
// must agree.
func (s status) openEverywhere() (uint64, error) {
	of := func(b openFlows) uint64 {
		if b.Open == nil {
			return 1 << 32
		}
		return *b.Open
	}
	var services, members, backends uint64
	for _, service := range s.Services {
		services += of(service.openFlows)
		for _, b := range service.Backends {
			members += of(b.openFlows)
		}
	}
	for _, b := range s.Backends {
		backends += of(b.openFlows)
	}
	if services != members || services != backends {
		return 0, fmt.Errorf("services have %d open flows, their backends %d, all backends %d", services, members, backends)
	}
	return services, nil
}

// TestOpenFlows: exactly the open flows are shown as open, with a daemon and without.
func TestOpenFlows(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.write(b.file(settings{}))
	b.start()
	shows := func(when string, want uint64) {
		t.Helper()
		eventually(t, 10*time.Second, when, func() error {
			if got, err := b.status().openEverywhere(); err != nil || got != want {
				return fmt.Errorf("%d flows are open, want %d: %w", got, want, err)
			}
			return nil
		})
	}
	shows("at the beginning", 0)
	sessions := b.open(t, 3)
	shows("with sessions", 6)
	b.kill()
	shows("without a daemon", 6)
	for _, s := range sessions[:2] {
		s.Close()
	}
	shows("when two have ended", 4)
}

// TestStatusOfAService: --service shows only one, --summary omits its backends.
func TestStatusOfAService(t *testing.T) {
	b, _ := exitBed(t, "dsr-ipip")
	b.start()
	ask := func(args ...string) status {
		t.Helper()
		code, out := b.shunt(append([]string{"status", "-o", "json", "--instance", b.instance, "--socket", b.socket}, args...)...)
		var s status
		if err := json.Unmarshal([]byte(out), &s); err != nil || code != 0 {
			t.Fatalf("shunt status %v: exit code %d, %v:\n%s", args, code, err, out)
		}
		return s
	}
	whole := ask()
	name := whole.Services[0].Name
	one := ask("--service", name) // its backends serve both address families
	if len(one.Services) != 1 || one.Services[0].Name != name || len(one.Services[0].Backends) != 2*len(b.Backends) || len(one.Backends) != len(b.Backends) {
		t.Errorf("--service %s shows %+v", name, one)
	}
	for _, of := range append(one.Backends, one.Services[0].Backends...) {
		if of.State != "active" || of.Open != nil {
			t.Errorf("%s of direct return: %+v", of.Address, of)
		}
	}
	if short := ask("--summary"); len(short.Services) != len(whole.Services) || len(short.Services[0].Backends) != 0 || len(short.Backends) != 0 {
		t.Errorf("--summary shows %+v", short)
	}
	for _, command := range [][]string{{"status"}, {"backend", "list"}} {
		code, out := b.shunt(append(command, "--service", "nobody", "--instance", b.instance, "--socket", b.socket)...)
		if want := `show service "nobody": no service has this name; there are `; code != 1 || !strings.Contains(out, want) {
			t.Errorf("%v of a service that is not there: exit code %d\n%s", command, code, out)
		}
	}
}

// TestCommandsMeanAnInstance: a command without an instance's name uses the instance of the daemon at
// its socket, and one with another name is refused and changes nothing.
func TestCommandsMeanAnInstance(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, Backends: 1})
	b.write(b.file(settings{}))
	b.start()
	backend := b.Backends[0].Addr4().String()
	for _, command := range []string{"status --summary", "backend list", "override list", "reload", "backend drain " + backend + " --wait --idle 1s", "backend undrain " + backend} {
		words := append(strings.Fields(command), "--socket", b.socket)
		if code, out := b.shunt(words...); code != 0 {
			t.Errorf("shunt %s: exit code %d\n%s", command, code, out)
		}
		code, out := b.shunt(append(words, "--instance", "other")...)
		if command == "status --summary" { // root reads the other instance's maps, which do not exist
			if code == 0 || !strings.Contains(out, "other") {
				t.Errorf("shunt %s of another instance: exit code %d\n%s", command, code, out)
			}
			continue
		}
		if code == 0 {
			t.Errorf("shunt %s of another instance: exit code 0\n%s", command, out)
		}
		if command != "backend list" && !strings.Contains(out, `this is "`+b.instance+`", but the request is for "other"`) {
			t.Errorf("shunt %s of another instance says:\n%s", command, out)
		}
	}
	if line := b.list(t)[backend]; line.State == "draining" {
		t.Errorf("the backend is listed as %+v", line)
	}
}
