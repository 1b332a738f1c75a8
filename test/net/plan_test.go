package net

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
)

// planned is the output of `shunt reload --plan` for the file.
func (b *bed) planned(t *testing.T) (code int, text string, open int) {
	t.Helper()
	code, text = b.shunt("reload", "--plan", "--socket", b.socket)
	_, answer := b.shunt("reload", "--plan", "--socket", b.socket, "-o", "json")
	var plan struct {
		Planned bool
		Cuts    []struct {
			OpenFlows int `json:"open_flows"`
			Text      string
		}
	}
	if err := json.Unmarshal([]byte(answer), &plan); err != nil {
		t.Fatalf("reload --plan -o json: %v\n%s", err, answer)
	}
	if plan.Planned != (code == 0 || code == 4) || (len(plan.Cuts) > 0) != (code == 4) {
		t.Errorf("exit code %d, but the answer is\n%s", code, answer)
	}
	for _, c := range plan.Cuts {
		open += c.OpenFlows
		if !strings.Contains(text, "! "+c.Text) {
			t.Errorf("the text does not have %q:\n%s", c.Text, text)
		}
	}
	return code, text, open
}

// ended counts the sessions that do not answer any more, and closes all.
func (b *bed) ended(sessions []*session) (count int) {
	failed := make(chan error, len(sessions))
	for _, s := range sessions {
		go func() { failed <- b.alive(s) }() // no host answers for a removed address: they wait together
	}
	for range sessions {
		if <-failed != nil {
			count++
		}
	}
	for _, s := range sessions {
		s.Close()
	}
	return count
}

// TestPlan edits a file. A plan changes nothing and gives the number of connections that end, and as many end.
func TestPlan(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm, Backends: 3})
	file := b.file(settings{})
	b.write(file)
	b.start()
	part := func(name string, vips ...string) string {
		return fmt.Sprintf("  - name: %s\n    address: [%s]\n    port: 80\n    protocol: tcp\n    backends:\n%s", name, strings.Join(vips, ", "), b.backends(nil, 8080))
	}
	quoted := func(at int) string { return fmt.Sprintf("%q", vips[at]) }
	begin, end := strings.Index(file, "  - name: web"), strings.Index(file, "  - name: dns")
	web, dns := file[begin:end], file[end:]
	with := func(services string) string { return file[:begin] + services }
	replaced := func(old, by string) string {
		if !strings.Contains(file, old) {
			t.Fatalf("the file does not have %q:\n%s", old, file)
		}
		return strings.Replace(file, old, by, 1)
	}
	key := func(line string) string { return replaced("  - name: web\n", "  - name: web\n    "+line+"\n") }
	first := b.backends([]int{1}, 8080)
	big := strings.NewReplacer("name: web\n", "name: big\n", "port: 80\n", "port: [81, 82]\n").Replace(web)
	all := strings.Replace(big, "[81, 82]", "[80, 81, 82]", 1)
	merged := with(all + dns)
	affine := func(services string) string {
		return strings.ReplaceAll(services, "    backends:\n", "    affinity: client-ip\n    backends:\n")
	}
	for _, edit := range []struct{ what, file, before string }{
		{"nothing", file, ""},
		{"services change places", with(dns + "\n" + web), ""},
		{"a service gets another name", replaced("name: web", "name: site"), ""},
		{"a service is split", with(part("v4", quoted(0)) + part("v6", quoted(1)) + dns), ""},
		{"a frontend is added", replaced("port: 80\n", "port: [80, 81]\n"), ""},
		{"a service is added", file + "  - {name: more, address: 192.0.2.77, port: 9, backends: [{address: 10.0.0.9}]}\n", ""},
		{"a backend is removed", replaced(first, ""), ""},
		{"a backend drains", replaced(first, strings.ReplaceAll(first, "}", ", weight: 0}")), ""},
		{"a backend weighs more", replaced(first, strings.ReplaceAll(first, "}", ", weight: 5}")), ""},
		{"backends get names", replaced(first, strings.Replace(first, "}", ", name: blue}", 1)), ""},
		{"affinity", key("affinity: client-ip"), ""},
		{"hash", key("hash: addresses"), ""},
		{"table_size", key("table_size: 251"), ""},
		{"on_no_backend", key("on_no_backend: drop"), ""},
		{"on_down", key("on_down: close"), ""},
		{"max_flows", key("max_flows: 1000"), ""},
		{"tcp_mss", key("tcp_mss: 1300"), ""},
		{"timeouts", "timeouts: {udp: 3m}\n" + file, ""},
		{"a service is removed", with(dns), ""},
		{"a service is merged into another one", merged, with(web + big + dns)},
		{"a merge is undone", with(web + big + dns), merged},
		{"families of two services are joined", with(strings.Replace(web, "name: web\n", "name: all\n", 1) + dns), with(part("v4", quoted(0)) + part("v6", quoted(1)) + dns)},
		{"a merge loses a backend", strings.ReplaceAll(merged, first, ""), with(web + big + dns)},
		{"affinity loses flows in a merge", merged, with(affine(web) + big + dns)},
		{"a merge loses flows to affinity", with(affine(all) + dns), with(web + big + dns)},
		{"a service with affinity gets another name", affine(replaced("name: web", "name: site")), affine(file)},
	} {
		t.Run(edit.what, func(t *testing.T) {
			b.t = t
			if edit.before != "" {
				b.reload(edit.before)
			}
			sessions := b.open(t, 6)
			b.write(edit.file)
			code, text, open := b.planned(t)
			if code != 0 && code != 4 {
				t.Fatalf("exit code %d\n%s", code, text)
			}
			for _, s := range sessions {
				if err := b.alive(s); err != nil {
					t.Errorf("after a plan: %v", err)
				}
			}
			b.reload(edit.file)
			if edit.file == with(dns) {
				b.reload(file) // clients of a removed address would wait; once it is back, they get a reset
			}
			if ended := b.ended(sessions); ended != open {
				t.Errorf("%d connections end, and the plan says %d:\n%s", ended, open, text)
			}
			if strings.Contains(edit.what, "merge") && (code == 0) == strings.Contains(edit.what, "loses") {
				t.Errorf("exit code %d\n%s", code, text)
			}
			t.Logf("exit code %d, %d connections end\n%s", code, open, text)
			b.reload(file)
		})
	}
}

// TestPlanOfASharedBackend removes a backend from one of its two services. The plan says that flows may end if they do,
// but not how many.
func TestPlanOfASharedBackend(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm, Backends: 3})
	file := b.file(settings{})
	begin, end := strings.Index(file, "  - name: web"), strings.Index(file, "  - name: dns")
	first := b.backends([]int{1}, 8080)
	on := func(name, ports string) string {
		return strings.NewReplacer("name: web\n", "name: "+name+"\n", "port: 80\n", "port: "+ports+"\n").Replace(file[begin:end])
	}
	with := func(services string) string { return file[:begin] + services + file[end:] }
	without := strings.ReplaceAll(on("web", "80"), first, "")
	affine := strings.Replace(on("big", "81"), "    backends:\n", "    affinity: client-ip\n    backends:\n", 1)
	b.write(file)
	b.start()
	for _, edit := range []struct {
		what, before, after string
		ends                bool
	}{
		{"another service has it", with(on("web", "80") + on("big", "81")), with(without + on("big", "81")), true},
		{"a frontend goes with it", with(on("web", "[80, 81]")), with(without + on("big", "81")), false},
		{"a frontend goes to affinity", with(on("web", "[80, 81]")), with(without + affine), true},
	} {
		t.Run(edit.what, func(t *testing.T) {
			b.t = t
			b.reload(edit.before)
			var sessions []*session
			held := map[string]int{}
			for len(held) < 3 { // by hash: some are with each backend soon
				for _, s := range b.open(t, 6) {
					sessions = append(sessions, s)
					held[s.first.Backend]++
				}
			}
			want := 0
			if edit.ends {
				want = held[b.Backends[0].Name()]
			}
			b.write(edit.after)
			code, text, open := b.planned(t)
			if (code == 4) != edit.ends || open > 0 || strings.Contains(text, "may end") != edit.ends {
				t.Errorf("exit code %d, %d flows counted\n%s", code, open, text)
			}
			b.reload(edit.after)
			if ended := b.ended(sessions); ended != want || edit.ends && want == 0 {
				t.Errorf("of connections with %v, %d end, want %d:\n%s", held, ended, want, text)
			}
		})
	}
}

// TestMergeOutlivesTheDaemon: flows of a service that was merged into another one go on when the daemon is killed and
// starts again, and status names their service.
func TestMergeOutlivesTheDaemon(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm, Backends: 2})
	file := b.file(settings{})
	begin, end := strings.Index(file, "  - name: web"), strings.Index(file, "  - name: dns")
	web := file[begin:end]
	big := strings.NewReplacer("name: web\n", "name: big\n", "port: 80\n", "port: [81, 82]\n").Replace(web)
	b.write(file[:begin] + web + big + file[end:])
	b.start()
	sessions := b.open(t, 4)
	b.reload(file[:begin] + strings.Replace(big, "[81, 82]", "[80, 81, 82]", 1) + file[end:])
	b.goOn(t, "after the merge", sessions)
	b.kill()
	b.goOn(t, "without a daemon", sessions)
	b.start()
	b.goOn(t, "after a restart", sessions)
	i := slices.IndexFunc(b.status().Services, func(s service) bool { return s.Name == "web" })
	if i < 0 {
		t.Fatalf("status does not have the service whose flows go on: %+v", b.status().Services)
	}
	if s := b.status().Services[i]; len(s.Backends)+len(s.Frontends) > 0 || s.Open == nil || int(*s.Open) < len(sessions) {
		t.Errorf("the merged service is %+v", s)
	}
}
