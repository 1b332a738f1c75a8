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
// programs at the interfaces are XDP's, and see no packet that the node itself sends.
func (b *bed) fromTheNode(t *testing.T, web, empty *corev1.Service) {
	t.Helper()
	ask := func(script, ip string, port int32) (string, error) {
		out, err := b.Balancer.Command(within(t), "bash", "-c",
			fmt.Sprintf(`echo $$ > "$0/cgroup.procs" && exec 3<>/dev/%s`, script), b.cgroup, ip, fmt.Sprint(port)).CombinedOutput()
		return string(out), err
	}
	answers := func(ip string, tcp, udp int32) {
		if out, err := ask(`tcp/$1/$2 && printf 'GET / HTTP/1.0\r\n\r\n' >&3 && cat <&3`, ip, tcp); err != nil || !strings.Contains(out, "200 OK") {
			t.Errorf("TCP to %s port %d: %v\n%s", ip, tcp, err, out)
		}
		if out, err := ask(`udp/$1/$2 && printf '?' >&3 && dd bs=1000 count=1 status=none <&3`, ip, udp); err != nil || out == "" {
			t.Errorf("UDP to %s port %d: %v\n%s", ip, udp, err, out)
		}
	}
	for _, ip := range web.Spec.ClusterIPs {
		answers(ip, 80, 53)
	}
	for _, ip := range []string{"127.0.0.1", "127.8.0.1", "::1"} {
		answers(ip, web.Spec.Ports[0].NodePort, web.Spec.Ports[2].NodePort)
	}
	if out, err := ask("tcp/$1/$2", empty.Spec.ClusterIP, 80); err == nil || !strings.Contains(out, "Connection refused") {
		t.Errorf("a Service without endpoints: %v\n%s\nwant that it refuses", err, out)
	}
}
