package net

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestReloadOfAWrongFile: a file with a fault changes nothing, the message names the fault's
// place, and no connection ends.
func TestReloadOfAWrongFile(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	right := b.file(settings{})
	b.write(right)
	b.start()
	sessions := b.open(t, 4)
	before := b.status().Services
	for name, wrong := range map[string]struct{ file, says string }{
		"not YAML":           {"services: [", "shunt.yaml:1"},
		"unknown key":        {strings.Replace(right, "port: 80\n", "prot: 80\n", 1), "prot"},
		"a fault among much": {b.file(settings{backends: []int{1}}) + "timeouts: {udp: 5}\n", "unit"},
		"missing interface":  {strings.Replace(right, "name: eth1", "name: eth7", 1), "eth7"},
		"other limits":       {b.file(settings{limits: "flows: 20000"}), "needs restart"},
		"limits and more":    {b.file(settings{limits: "flows: 20000", backends: []int{1}}), "needs restart"},
	} {
		b.write(wrong.file)
		code, out := b.shunt("reload", "--socket", b.socket)
		if code != 1 || !strings.Contains(out, wrong.says) {
			t.Errorf("%s: exit code %d, want 1 and the words %q:\n%s", name, code, wrong.says, out)
		}
		if now := b.status().Services; fmt.Sprint(frontendsOf(now)) != fmt.Sprint(frontendsOf(before)) {
			t.Errorf("%s: the refused file changed the services to %+v", name, now)
		}
		b.goOn(t, "after the refused file "+name, sessions)
	}
	if err := os.Remove(b.path); err != nil {
		t.Fatal(err)
	}
	if code, out := b.shunt("reload", "--socket", b.socket); code != 1 || !strings.Contains(out, b.path) {
		t.Errorf("reload of a file that is not there: exit code %d, want 1 and its path:\n%s", code, out)
	}
	b.goOn(t, "after the file went", sessions)
	if out := b.reload(right); !strings.Contains(out, "nothing to change") {
		t.Errorf("the file in force again: %s", out)
	}
	if c := b.status().condition("config_refused"); c != "" {
		t.Errorf("the file is right again, yet: %s", c)
	}
}

// frontendsOf is the part of the status that a reload may change, without the counters.
func frontendsOf(services []service) (list []string) {
	for _, s := range services {
		line := fmt.Sprint(s.Name, s.Frontends)
		for _, backend := range s.Backends {
			line += fmt.Sprint(" ", backend.Address, "=", backend.Slots)
		}
		list = append(list, line)
	}
	return list
}

// TestReloadMovesNoConnection: the removal of a backend ends its connections and no others; an
// added backend moves none, and takes its share of new ones.
func TestReloadMovesNoConnection(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm, Backends: 3})
	b.write(b.file(settings{attach: "native"}))
	b.start()
	sessions := b.open(t, 12) // of each family; none on b2 once in 17,000 runs

	out := b.reload(b.file(settings{attach: "native", backends: []int{1, 3}}))
	if !strings.Contains(out, at(b.Backends[1].Addr4(), 8080)+" removed") {
		t.Errorf("the difference does not name the removed backend:\n%s", out)
	}
	var others []*session
	for _, s := range sessions {
		if s.first.Backend != "b2" {
			others = append(others, s)
			continue
		}
		if err := b.alive(s); err == nil {
			t.Errorf("a connection to the removed backend goes on")
		}
	}
	if len(others) == len(sessions) || len(others) == 0 {
		t.Fatalf("%d of %d connections are with b1 and b3", len(others), len(sessions))
	}
	b.goOn(t, "after b2 was removed", others)
	others = append(others, b.open(t, 4)...)
	for _, s := range others {
		if s.first.Backend == "b2" {
			t.Error("a new connection reached the removed backend")
		}
	}

	out = b.reload(b.file(settings{attach: "native"}))
	if !strings.Contains(out, at(b.Backends[1].Addr4(), 8080)+" added") {
		t.Errorf("the difference does not name the added backend:\n%s", out)
	}
	b.goOn(t, "after b2 was added", others)
	b.everyBackendAnswers(t, lab.VIP4, "nat")
	b.everyBackendAnswers(t, lab.VIP6, "nat")

	weighted := strings.ReplaceAll(b.file(settings{attach: "native"}), "port: 8080}", "port: 8080, weight: 7}")
	weighted = strings.Replace(weighted, "port: 8080, weight: 7}", "port: 8080, weight: 0}", 1)
	b.reload(weighted)
	b.goOn(t, "after new weights, 0 among them", others)
	for range 30 {
		answer, err := b.get(b.Client.HTTPClient(false), at(lab.VIP4, 80))
		if err != nil {
			t.Fatal(err)
		}
		if answer.Backend == "b1" {
			t.Fatal("a new connection went to the backend of weight 0")
		}
	}
}

// TestReloadOfSettings: a change outside services is a line of the difference, and in effect.
// One that the data plane cannot follow is refused before any other is carried out.
func TestReloadOfSettings(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	interfaces := b.Balancer.Interfaces()
	if len(interfaces) != 2 {
		t.Fatalf("the balancer has the interfaces %v", interfaces)
	}
	first, last := interfaces[0].Name, interfaces[1].Name
	native := b.file(settings{attach: "native"})
	generic := strings.Replace(native, last+", attach: native", last+", attach: generic", 1)
	auto := strings.Replace(native, last+", attach: native", last+", attach: auto", 1)
	without := strings.Replace(native, fmt.Sprintf("  - {name: %s, attach: native}\n", last), "", 1)
	b.write(native)
	b.start()
	for _, c := range []struct{ what, file, want, attached string }{
		{"another way to attach", generic, "~ interface " + last + ": attach native -> attach generic", first + " native, " + last + " generic"},
		{"the best way that there is", auto, "~ interface " + last + ": attach generic -> attach auto", first + " native, " + last + " native"},
		{"generic mode again", generic, "~ interface " + last + ": attach auto -> attach generic", first + " native, " + last + " generic"},
		{"an interface less", without, "- interface " + last + ": attach generic", first + " native"},
		{"an interface more", native, "+ interface " + last + ": attach native", first + " native, " + last + " native"},
		{"a timeout and ports", native + "timeouts: {udp: 150s}\nsnat: {ports: 1024-9999}\n",
			"~ snat.ports: ports outside net.ipv4.ip_local_port_range -> 1024-9999\n~ timeouts.udp: 5m -> 2m30s", first + " native, " + last + " native"},
		{"what was before", native, "~ snat.ports: 1024-9999 -> ports outside net.ipv4.ip_local_port_range\n~ timeouts.udp: 2m30s -> 5m", first + " native, " + last + " native"},
	} {
		if out := strings.TrimSpace(b.reload(c.file)); !strings.HasSuffix("\n"+out, "\n"+c.want) { // warnings of the file may come first
			t.Errorf("%s: the difference is\n%s\nwant\n%s", c.what, out, c.want)
		}
		var attached []string
		for _, a := range b.status().Attached {
			attached = append(attached, a.Interface+" "+a.Mode)
		}
		if got := strings.Join(attached, ", "); got != c.attached {
			t.Errorf("%s: attached are %s, want %s", c.what, got, c.attached)
		}
	}
	b.goOn(t, "after all that", b.open(t, 2))
	b.write(without + "api: {group: root}\n")
	if code, out := b.shunt("reload", "--socket", b.socket); code != 1 || !strings.Contains(out, "api.group from root only to root needs restart") {
		t.Errorf("another group: exit code %d, want 1 and that it needs a restart:\n%s", code, out)
	}
	if attached := b.status().Attached; len(attached) != 2 {
		t.Errorf("the refused file has changed what is attached: %+v", attached)
	}
}

// TestWatch: --watch applies a file that was renamed into place, and one that was written in
// place; a wrong one is reported and changes nothing.
func TestWatch(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	b.write(b.file(settings{}))
	b.start("--watch")
	sessions := b.open(t, 2)
	b.write(b.file(settings{backends: []int{1}}))
	eventually(t, 10*time.Second, "a renamed file", func() error { return b.webBackends(1) })
	if err := os.WriteFile(b.path, []byte(b.file(settings{})), 0o644); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "a file written in place", func() error { return b.webBackends(2) })
	b.write("services: 5\n")
	eventually(t, 10*time.Second, "the condition config_refused", func() error {
		if b.status().condition("config_refused") == "" {
			return fmt.Errorf("conditions: %+v", b.status().Daemon.Conditions)
		}
		return nil
	})
	if err := b.webBackends(2); err != nil {
		t.Error(err)
	}
	b.write(b.file(settings{backends: []int{1}})) // again by renaming: the watch must not stay on the old file
	eventually(t, 10*time.Second, "a second renamed file", func() error { return b.webBackends(1) })
	for _, s := range sessions {
		if s.first.Backend == "b1" {
			if err := b.alive(s); err != nil {
				t.Error(err)
			}
		}
	}
}

// webBackends returns nil if the service web has so many backends of each family.
func (b *bed) webBackends(want int) error {
	for _, s := range b.status().Services {
		if s.Name == "web" && len(s.Backends) == 2*want {
			return nil
		}
	}
	return fmt.Errorf("web has not %d backends of each family: %v", want, frontendsOf(b.status().Services))
}

// TestSourceAddressesChange: the source addresses of full NAT need not be the host's: shunt
// answers for them. An added one disturbs no connection, and a removed one only its own.
func TestSourceAddressesChange(t *testing.T) {
	for _, layout := range []lab.Layout{lab.TwoArm, lab.OneArm} {
		t.Run(string(layout), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: layout})
			own, fresh := []string{"10.0.0.1", "2001:db8:1::1"}, []string{"10.0.0.50", "2001:db8:1::50"}
			from := func(sources ...string) string {
				return b.file(settings{}) + "snat: {addresses: [\"" + strings.Join(sources, "\", \"") + "\"]}\n"
			}
			b.write(from(own...))
			b.start()
			sessions := b.open(t, 4)
			b.reload(from(append(slices.Clone(own), fresh...)...))
			eventually(t, 10*time.Second, "announcement of the source addresses", func() error {
				for _, source := range fresh {
					if !strings.Contains(b.daemon.log(), "address="+source+" ") {
						return fmt.Errorf("%s is not answered for", source)
					}
				}
				return nil
			})
			sessions = append(sessions, b.open(t, 12)...) // all from one of two addresses: once in 2,000 runs
			b.goOn(t, "with addresses added", sessions)

			b.reload(from(fresh...))
			stay := slices.DeleteFunc(sessions, func(s *session) bool { return !slices.Contains(fresh, s.source()) })
			if len(stay) == 0 {
				t.Fatal("no connection came from an added address")
			}
			stay = append(stay, b.open(t, 2)...)
			for _, s := range stay {
				if !slices.Contains(fresh, s.source()) {
					t.Errorf("with snat.addresses %v the backend saw %s", fresh, s.first.Remote)
				}
			}
			b.goOn(t, "with addresses taken away", stay)
		})
	}
}

// source is the address that the backend sees.
func (s *session) source() string { return netip.MustParseAddrPort(s.first.Remote).Addr().String() }
