package net

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestServices makes objects in an apiserver and sends packets to their services. One control plane serves for all; the
// steps at the end remove objects.
func TestServices(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	front := b.Balancer.Interfaces()[0]
	b.node("n1", front.IPv4.Addr(), front.IPv6.Addr())
	b.node("n2")
	for i, node := range []string{"n1", "n1", "n2"} {
		b.pod(b.Backends[i], node, "web")
	}
	const selector = "selector: {app: web}, ipFamilyPolicy: PreferDualStack"
	all, here := []string{"b1", "b2", "b3"}, []string{"b1", "b2"}
	web := b.service("web", selector+", type: NodePort, externalIPs: [192.0.2.77], ports: [{name: http, port: 80, targetPort: web}, {name: other, port: 81, targetPort: 9090}, {name: dns, port: 53, targetPort: dns, protocol: UDP}]")
	local := b.service("local", selector+", type: LoadBalancer, externalTrafficPolicy: Local, ports: [{port: 80, targetPort: 8080}]")
	local.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.78"}}
	_, err := b.client.CoreV1().Services("default").UpdateStatus(within(t), local, metav1.UpdateOptions{})
	b.must(err)
	empty := b.service("empty", "selector: {app: nobody}, ports: [{port: 80}]")
	sticky := b.service("sticky", "selector: {app: web}, sessionAffinity: ClientIP, ports: [{port: 80, targetPort: 8080}]")
	long := b.service(strings.Repeat("l", 63), "selector: {app: web}, ports: [{name: a-port-of-15-ch, port: 80, targetPort: 8080}]")
	b.service("headless", "selector: {app: web}, clusterIP: None, ports: [{port: 80, targetPort: 8080}]")
	b.service("taken", fmt.Sprintf("selector: {app: web}, externalIPs: ['%s'], ports: [{port: 7000, targetPort: 8080}]", lab.VIP4))
	b.service("sctp", "selector: {app: web}, ports: [{port: 80, protocol: SCTP}]")
	b.start()

	t.Run("of the file", func(t *testing.T) { b.served(t, "tcp", at(lab.VIP4.String(), 7000), "b3") })
	for _, ip := range web.Spec.ClusterIPs {
		t.Run("cluster IP "+ip, func(t *testing.T) {
			b.served(t, "tcp", at(ip, 80), all...)
			b.served(t, "tcp", at(ip, 81), all...)
			b.served(t, "udp", at(ip, 53), all...)
		})
	}
	t.Run("from the node", func(t *testing.T) { b.fromTheNode(t, web, empty) })
	for _, a := range []netip.Addr{front.IPv4.Addr(), front.IPv6.Addr()} {
		t.Run("node port at "+a.String(), func(t *testing.T) {
			b.served(t, "tcp", at(a.String(), web.Spec.Ports[0].NodePort), all...)
			b.served(t, "udp", at(a.String(), web.Spec.Ports[2].NodePort), all...)
		})
	}
	t.Run("external IP", func(t *testing.T) { b.served(t, "tcp", "192.0.2.77:80", all...) })
	t.Run("local policy", func(t *testing.T) {
		b.served(t, "tcp", "192.0.2.78:80", here...)
		b.served(t, "tcp", at(front.IPv4.Addr().String(), local.Spec.Ports[0].NodePort), here...)
		b.served(t, "tcp", at(local.Spec.ClusterIP, 80), all...)
		answer, err := b.ask("tcp", "192.0.2.78:80")
		if err != nil || !strings.HasPrefix(answer.Remote, b.Client.Addr4().String()+":") {
			t.Errorf("the pod sees %q, want the client %s; %v", answer.Remote, b.Client.Addr4(), err)
		}
	})
	t.Run("no endpoint", func(t *testing.T) { b.refused(t, at(empty.Spec.ClusterIP, 80)) })
	t.Run("affinity", func(t *testing.T) {
		first, err := b.ask("tcp", at(sticky.Spec.ClusterIP, 80))
		b.must(err)
		b.served(t, "tcp", at(sticky.Spec.ClusterIP, 80), first.Backend)
	})
	t.Run("a name of 87 bytes, which is cut", func(t *testing.T) { b.served(t, "tcp", at(long.Spec.ClusterIP, 80), all...) })
	t.Run("what is not served is named", func(t *testing.T) { b.namesFaults(t) })
	t.Run("faults are Events", func(t *testing.T) { b.makesEvents(t) })
	t.Run("a user without rights", func(t *testing.T) { b.forbids(t) })
	t.Run("readiness", func(t *testing.T) { b.followsReadiness(t, web) })
	t.Run("metrics", func(t *testing.T) { b.measures(t) })
	t.Run("restart", func(t *testing.T) { b.restarts(t, web) })
	t.Run("termination", func(t *testing.T) { b.servesWhileTerminating(t, web) })
	t.Run("the apiserver goes", func(t *testing.T) {
		plane := b.plane
		b.plane = nil
		if err := plane.End(syscall.SIGTERM, patience); err != nil {
			t.Fatal(err)
		}
		b.awaits(b.agent, "the apiserver does not answer")
		b.served(t, "tcp", at(web.Spec.ClusterIP, 80), "b1")
		b.tells(t, exitUnwell, "In step with the cluster since", "has not answered since", "it is unknown whether the node is in step")
	})
}

// The exit codes of `shunt-kube status`.
const (
	exitWell   = 0
	exitUnwell = 1
)

// tells waits until `shunt-kube status` ends with a code, and its output has these texts.
func (b *bed) tells(t *testing.T, code int, texts ...string) {
	t.Helper()
	eventually(t, "what shunt-kube status says", func() error {
		got, out := b.run("shunt-kube", "status", "--socket", b.socket())
		for _, text := range texts {
			if got != code || !strings.Contains(out, text) {
				return fmt.Errorf("exit code %d, want %d, and %q in\n%s", got, code, text, out)
			}
		}
		return nil
	})
}

// namesFaults looks for the Services that are not served, or not wholly: in the log, and in
// `shunt-kube services`.
func (b *bed) namesFaults(t *testing.T) {
	b.awaits(b.agent, `source \"kubernetes\": frontend tcp 192.0.2.10:7000 belongs to source \"file\"`)
	code, out := b.run("shunt-kube", "services", "--kubeconfig", b.kubeconfig(), "--node-name", "n1")
	for _, want := range []string{"Service default/sctp: port 80 is SCTP", "default/local@external", "default/web:dns"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("shunt-kube services lacks %q: exit code %d\n%s", want, code, out)
		}
	}
	b.tells(t, exitWell, "In step with the cluster since", "fault      Service default/sctp: port 80 is SCTP", "fault      Service default/taken: default/taken", "2 not served", "left alone", "programs   eth0 native, eth1 native")
	if strings.Contains(out, "headless") {
		t.Errorf("shunt-kube services has the headless Service:\n%s", out)
	}
	t.Log("\n" + out)
	code, out = b.run("shunt", "status", "--instance", b.instance, "--socket", b.socket())
	if code != 0 || !strings.Contains(out, "default/web:http") || strings.Contains(out, "default/taken") {
		t.Errorf("shunt status: exit code %d\n%s", code, out)
	}
	t.Log("\n" + out)
}

// events waits until these are among the Events about a Service: type, reason, count and the message's beginning. On a busy machine
// there may be another one, of endpoints that came late.
func (b *bed) events(t *testing.T, service string, want ...string) {
	t.Helper()
	eventually(t, "Events about "+service, func() error {
		list, err := b.client.CoreV1().Events("default").List(within(t), metav1.ListOptions{FieldSelector: "involvedObject.kind=Service,involvedObject.name=" + service})
		if err != nil {
			return err
		}
		var lines []string
		for _, e := range list.Items {
			lines = append(lines, fmt.Sprintf("%s %s %d %s", e.Type, e.Reason, e.Count, e.Message))
		}
		all := strings.Join(lines, "\n")
		for _, w := range want {
			if !strings.Contains("\n"+all, "\n"+w) {
				return fmt.Errorf("there are\n%s\nwant\n%s", all, strings.Join(want, "\n"))
			}
		}
		return nil
	})
}

// makesEvents: each cause is an Event on its Service, which says so when it is fixed.
func (b *bed) makesEvents(t *testing.T) {
	b.events(t, "taken", "Warning ServiceRefused 1 on node n1: default/taken")
	b.events(t, "empty", "Warning NoEndpoints 1 default/empty: no endpoint takes connections")
	b.events(t, "sctp", "Warning SCTPNotServed 1 port 80 is SCTP")
	sctp, err := b.client.CoreV1().Services("default").Get(within(t), "sctp", metav1.GetOptions{})
	b.must(err)
	for _, e := range []string{"web", "sticky", "headless"} {
		eventually(t, "nothing is wrong with "+e, func() error {
			list, err := b.client.CoreV1().Events("default").List(within(t), metav1.ListOptions{FieldSelector: "type=Warning,involvedObject.name=" + e})
			if err == nil && len(list.Items) > 0 {
				err = fmt.Errorf("%s", list.Items[0].Message)
			}
			return err
		})
	}
	sctp.Spec.Ports[0].Protocol, sctp.Spec.Ports[0].TargetPort = corev1.ProtocolTCP, intstr.FromInt32(8080)
	sctp, err = b.client.CoreV1().Services("default").Update(within(t), sctp, metav1.UpdateOptions{})
	b.must(err)
	b.served(t, "tcp", at(sctp.Spec.ClusterIP, 80), "b1", "b2", "b3")
	b.events(t, "sctp", "Normal SCTPNotServed 1 Ended: port 80 is SCTP")
}

// measures reads kube-proxy's metrics after the endpoints of a Service have come and changed.
func (b *bed) measures(t *testing.T) {
	eventually(t, "metrics", func() error {
		response, err := b.Balancer.HTTPClient(false).Get("http://127.0.0.1:9470/metrics")
		if err != nil {
			return err
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			return err
		}
		for _, line := range []string{
			"kubeproxy_sync_proxy_rules_duration_seconds_count ", "kubeproxy_network_programming_duration_seconds_count ",
			"kubeproxy_sync_proxy_rules_last_timestamp_seconds ", "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds ",
			"kubeproxy_sync_proxy_rules_service_changes_total ", "kubeproxy_sync_proxy_rules_endpoint_changes_total ",
		} {
			_, after, has := strings.Cut(string(text), "\n"+line)
			if value, _, _ := strings.Cut(after, "\n"); !has || value == "0" {
				return fmt.Errorf("%s is %q", line, value)
			}
		}
		return nil
	})
}

// forbids asks as a user who may read nothing.
func (b *bed) forbids(t *testing.T) {
	text, err := os.ReadFile(b.kubeconfig())
	b.must(err)
	path := filepath.Join(b.folder, "nobody.kubeconfig")
	b.must(os.WriteFile(path, []byte(strings.Replace(string(text), ":shunt-kube'", ":nobody'", 1)), 0o600))
	timeout := time.Second // it waits all of that; a busy machine needs longer to be answered once
	eventually(t, "what is forbidden is said", func() error {
		timeout *= 2
		code, out := b.run("shunt-kube", "services", "--kubeconfig", path, "--node-name", "n1", "--timeout", timeout.String())
		for _, want := range []string{"forbidden", "system:serviceaccount:kube-system:nobody", "role.yaml"} {
			if code != 1 || !strings.Contains(out, want) {
				return fmt.Errorf("without rights the output lacks %q: exit code %d\n%s", want, code, out)
			}
		}
		return nil
	})
}

// session opens a connection to a Service, to the pod of this name.
func (b *bed) session(t *testing.T, address, to string) *lab.Session {
	t.Helper()
	for range 200 {
		s, err := b.Client.OpenSession(within(t), "tcp", netip.AddrPort{}, address)
		b.must(err)
		answer, err := s.Ask(within(t), "/")
		b.must(err)
		if answer.Backend == to {
			t.Cleanup(func() { s.Close() })
			return s
		}
		s.Close()
	}
	t.Fatalf("no connection to %s is to %s", address, to)
	return nil
}

// goesOn reports a connection that is broken or elsewhere.
func (b *bed) goesOn(t *testing.T, when string, s *lab.Session, with string) {
	t.Helper()
	if answer, err := s.Ask(within(t), "/"); err != nil || answer.Backend != with {
		t.Errorf("%s, a connection to %s is answered by %q, %v", when, with, answer.Backend, err)
	}
}

// followsReadiness: a pod that is not ready gets no new connection and keeps the old ones.
func (b *bed) followsReadiness(t *testing.T, web *corev1.Service) {
	address := at(web.Spec.ClusterIP, 80)
	s := b.session(t, address, "b2")
	b.ready("b2", false)
	b.served(t, "tcp", address, "b1", "b3")
	b.served(t, "udp", at(web.Spec.ClusterIP, 53), "b1", "b3")
	b.goesOn(t, "after its pod is not ready", s, "b2")
	b.ready("b2", true)
	b.served(t, "tcp", address, "b1", "b2", "b3")
	b.goesOn(t, "after its pod is ready again", s, "b2")
}

// restarts: SIGTERM leaves the data plane, and the next agent takes it over.
func (b *bed) restarts(t *testing.T, web *corev1.Service) {
	address := at(web.Spec.ClusterIP, 80)
	s := b.session(t, address, "b1")
	b.must(b.agent.End(syscall.SIGTERM, patience))
	b.goesOn(t, "without an agent", s, "b1")
	b.served(t, "tcp", address, "b1", "b2", "b3")
	b.start()
	b.goesOn(t, "with the next agent", s, "b1")
	b.served(t, "tcp", address, "b1", "b2", "b3")
}

// servesWhileTerminating deletes all pods but does not end them, as kubelets do that wait for the
// grace period: they serve on as long as there is no other (KEP-1669).
func (b *bed) servesWhileTerminating(t *testing.T, web *corev1.Service) {
	address := at(web.Spec.ClusterIP, 80)
	seconds := int64(600)
	terminate := func(name string) {
		b.must(b.client.CoreV1().Pods("default").Delete(within(t), name, metav1.DeleteOptions{GracePeriodSeconds: &seconds}))
	}
	s := b.session(t, address, "b3")
	terminate("b3")
	b.served(t, "tcp", address, "b1", "b2")
	b.goesOn(t, "while its pod ends", s, "b3")
	terminate("b1")
	terminate("b2")
	b.served(t, "tcp", address, "b1", "b2", "b3")
	none := int64(0)
	for _, name := range []string{"b2", "b3"} { // their kubelet has ended them
		b.must(b.client.CoreV1().Pods("default").Delete(within(t), name, metav1.DeleteOptions{GracePeriodSeconds: &none}))
	}
	b.served(t, "tcp", address, "b1")
}
