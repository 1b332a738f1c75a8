package net

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// newCgroup makes a cgroup for programs on the node whose sockets are served.
func newCgroup(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mountinfo") // proc_pid_mountinfo(5)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		fields, after, _ := strings.Cut(line, " - ")
		at := strings.Fields(fields)
		if !strings.HasPrefix(after, "cgroup2 ") || at[3] != "/" {
			continue
		}
		path := filepath.Join(at[4], "shunt-"+name)
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			// Its last process may be ending still.
			eventually(t, "the cgroup is removed", func() error { return os.Remove(path) })
		})
		return path
	}
	t.Fatal("no cgroup2 file system is mounted")
	return ""
}

// fromTheNode asks a Service from a program on the node, which shunt serves at its sockets alone: the
// programs at the interfaces are XDP's, and see nothing of what the node itself sends.
func (b *bed) fromTheNode(t *testing.T, web, empty *corev1.Service) {
	t.Helper()
	ask := func(script, ip string) (string, error) {
		out, err := b.Balancer.Command(within(t), "bash", "-c",
			fmt.Sprintf(`echo $$ > "$0/cgroup.procs" && exec 3<>/dev/%s`, script), b.cgroup, ip).CombinedOutput()
		return string(out), err
	}
	for _, ip := range web.Spec.ClusterIPs {
		if out, err := ask(`tcp/$1/80 && printf 'GET / HTTP/1.0\r\n\r\n' >&3 && cat <&3`, ip); err != nil || !strings.Contains(out, "200 OK") {
			t.Errorf("TCP to %s: %v\n%s", ip, err, out)
		}
		if out, err := ask(`udp/$1/53 && printf '?' >&3 && dd bs=1000 count=1 status=none <&3`, ip); err != nil || out == "" {
			t.Errorf("UDP to %s: %v\n%s", ip, err, out)
		}
	}
	if out, err := ask("tcp/$1/80", empty.Spec.ClusterIP); err == nil || !strings.Contains(out, "Connection refused") {
		t.Errorf("a Service without endpoints: %v\n%s\nwant that it refuses", err, out)
	}
}
