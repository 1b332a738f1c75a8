package net

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// newCgroup makes a cgroup for programs whose sockets are served.
func newCgroup(t *testing.T, name string) string {
	t.Helper()
	path, remove, err := lab.MakeCgroup("shunt-" + name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { eventually(t, 10*time.Second, "the cgroup is removed", remove) }) // its last process may be ending still
	return path
}

// inCgroup is a script that runs in a cgroup, on the balancer.
func (b *bed) inCgroup(cgroup, script string) *lab.Command {
	return b.Balancer.Command(within(b.t, time.Minute), "bash", "-c", `echo $$ > "$0/cgroup.procs" && `+script, cgroup)
}

// asks is a script: it sends a request to the VIP, prints the answer, and waits for the end.
const asks = `exec 3<>/dev/tcp/%s/80 && printf 'GET / HTTP/1.0\r\n\r\n' >&3 && cat <&3`

// TestSockets: programs in the cgroup reach VIPs that no program at an interface would serve to this
// host, also while the daemon is dead. When their backend goes, their connections end; programs in
// other cgroups have none.
func TestSockets(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm})
	cgroup := newCgroup(t, b.instance)
	section := func(backends ...int) string {
		return b.file(settings{backends: backends}) + fmt.Sprintf("sockets: {cgroup: %s}\nmetrics: {listen: \"127.0.0.1:9470\"}\n", cgroup)
	}
	b.write(section(1))
	b.start()
	served := func(when string) {
		t.Helper()
		out, err := b.inCgroup(cgroup, fmt.Sprintf(asks, lab.VIP4)).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "200 OK") {
			t.Errorf("%s: a program in the cgroup: %v\n%s", when, err, out)
		}
	}
	served("at first")
	b.kill()
	served("while the daemon is dead")
	if code, out := b.shunt("status", "--instance", b.instance, "--socket", b.socket); code != 0 || !strings.Contains(out, "chosen ") {
		t.Errorf("shunt status without a daemon: exit code %d, want 0 and how often a backend was chosen\n%s", code, out)
	}
	b.start()
	served("after it has been started again")

	holds, err := b.inCgroup(cgroup, fmt.Sprintf(`exec 3<>/dev/tcp/%s/80 && echo open && cat <&3`, lab.VIP4)).Spawn()
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "a connection", func() error {
		if !strings.Contains(holds.Log(), "open") {
			return errors.New(holds.Log())
		}
		return nil
	})
	b.reload(section(2))
	eventually(t, 10*time.Second, "the connection to the backend that has gone is ended", func() error {
		if !strings.Contains(holds.Log(), "connection abort") {
			return errors.New(holds.Log())
		}
		return nil
	})
	eventually(t, 10*time.Second, "status and metrics say why it was closed", func() error {
		if _, out := b.shunt("status", "--instance", b.instance, "--socket", b.socket); !strings.Contains(out, "closed_gone ") {
			return errors.New(out)
		}
		s, err := b.scrape("127.0.0.1:9470")
		if err != nil {
			return err
		}
		return s.wants(map[string]float64{`shunt_socket_calls_total{outcome="closed_gone"}`: 1, `shunt_socket_calls_total{outcome="closed_left"}`: 0})
	})
	served("with another backend")

	b.reload(b.file(settings{}))
	if out, err := b.inCgroup(cgroup, fmt.Sprintf(asks, lab.VIP4)).CombinedOutput(); err == nil || !strings.Contains(string(out), "unreachable") {
		t.Errorf("without sockets in the file, a program in the cgroup: %v\n%s\nwant that the VIP is unreachable", err, out)
	}
	b.write(b.file(settings{}) + "sockets: {cgroup: /proc}\n")
	code, out := b.shunt("reload", "--socket", b.socket)
	if want := "the path is in no cgroup2 file system"; code != 1 || !strings.Contains(out, want) {
		t.Errorf("reload with a path that is no cgroup: exit code %d, want 1 and %q\n%s", code, want, out)
	}
}
