package net

import (
	"fmt"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
	corev1 "k8s.io/api/core/v1"
)

// newCgroup makes a cgroup for programs on the node whose sockets are served.
func newCgroup(t *testing.T, name string) string {
	t.Helper()
	path, remove, err := lab.MakeCgroup("shunt-" + name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { eventually(t, "the cgroup is removed", remove) }) // its last process may be ending still
	return path
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
