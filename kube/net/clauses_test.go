package net

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestClauses tests parts of a Service's spec, one after the other: each is an object in an apiserver, and packets go
// to its services. Only steps that say so change an object after the start.
func TestClauses(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.must(b.Balancer.SetForwarding(true))
	front := b.Balancer.Interfaces()[0].IPv4.Addr()
	b.node("n1", front, b.Balancer.Interfaces()[0].IPv6.Addr())
	b.node("n2")
	for name, zone := range map[string]string{"n1": "east", "n2": "west"} {
		node, err := b.client.CoreV1().Nodes().Get(within(t), name, metav1.GetOptions{})
		b.must(err)
		node.Labels = map[string]string{corev1.LabelTopologyZone: zone}
		_, err = b.client.CoreV1().Nodes().Update(within(t), node, metav1.UpdateOptions{})
		b.must(err)
	}
	for i, node := range []string{"n1", "n1", "n2"} {
		b.pod(b.Backends[i], node, "web")
	}
	const web, far = "selector: {app: web}, ports: [{port: 80, targetPort: 8080}]", "selector: {pod: b3}, ports: [{port: 80, targetPort: 8080}]"
	const local = ", type: LoadBalancer, externalTrafficPolicy: Local"
	all, here := []string{"b1", "b2", "b3"}, []string{"b1", "b2"}
	near := b.balanced("near", web+local, "192.0.2.90")
	away := b.balanced("away", far+local, "192.0.2.91")
	both := b.balanced("both", far+local+", internalTrafficPolicy: Local", "192.0.2.92")
	inner := b.service("inner", web+", internalTrafficPolicy: Local")
	six := b.service("six", web+", ipFamilies: [IPv6], ipFamilyPolicy: SingleStack")
	brief := b.service("brief", web+", sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 1}}")
	close := b.service("close", web+", trafficDistribution: PreferClose")
	early := b.service("early", web+", publishNotReadyAddresses: true")
	let := b.balanced("let", web+", type: LoadBalancer, loadBalancerSourceRanges: [198.51.100.0/24]", "192.0.2.93")
	kept := b.balanced("kept", web+", type: LoadBalancer, loadBalancerSourceRanges: [203.0.113.0/24]", "192.0.2.94")
	bare := b.balanced("bare", web+", type: LoadBalancer, allocateLoadBalancerNodePorts: false", "192.0.2.95")
	proxied := b.balanced("proxied", web+", type: LoadBalancer", "192.0.2.96", "192.0.2.97 Proxy")
	others := b.labelled("others", web, "service.kubernetes.io/service-proxy-name", "other")
	b.service("name", "type: ExternalName, externalName: example.org")
	b.start()

	t.Run("pod IP", func(t *testing.T) {
		b.served(t, "tcp", at(b.Backends[2].Addr4().String(), 8080), "b3")
		b.seesTheClient(t, at(b.Backends[2].Addr4().String(), 8080))
	})
	t.Run("host port", func(t *testing.T) { b.hostPort(t) })
	t.Run("external name", func(t *testing.T) {
		if code, out := b.run("shunt-kube", "services", "--kubeconfig", b.kubeconfig(), "--node-name", "n1"); code != 0 || strings.Contains(out, "default/name") || !strings.Contains(out, "default/inner") {
			t.Errorf("exit code %d\n%s", code, out)
		}
	})
	t.Run("another proxy's", func(t *testing.T) { b.unserved(t, at(others.Spec.ClusterIP, 80)) })
	t.Run("internal policy Local", func(t *testing.T) {
		b.served(t, "tcp", at(inner.Spec.ClusterIP, 80), here...)
		b.servedInside(t, at(inner.Spec.ClusterIP, 80), here...)
	})
	t.Run("external policy Local, from outside", func(t *testing.T) {
		b.served(t, "tcp", "192.0.2.90:80", here...)
		b.seesTheClient(t, "192.0.2.90:80")
		for _, address := range []string{"192.0.2.91:80", at(front.String(), away.Spec.Ports[0].NodePort), "192.0.2.92:80"} {
			b.unserved(t, address)
		}
		b.served(t, "tcp", at(away.Spec.ClusterIP, 80), "b3")
	})
	t.Run("external policy Local, from inside", func(t *testing.T) {
		for service, by := range map[*corev1.Service][]string{near: all, away: {"b3"}, both: {"b3"}} {
			port := service.Spec.Ports[0].NodePort
			for _, address := range []string{at(service.Status.LoadBalancer.Ingress[0].IP, 80), at(front.String(), port), at("127.0.0.1", port)} {
				b.servedInside(t, address, by...)
			}
		}
	})
	t.Run("health check node port", func(t *testing.T) { b.answersHealth(t, near, away) })
	t.Run("IPv6 alone", func(t *testing.T) { b.served(t, "tcp", at(six.Spec.ClusterIP, 80), all...) })
	t.Run("affinity ends", func(t *testing.T) { b.moves(t, at(brief.Spec.ClusterIP, 80)) })
	t.Run("traffic distribution", func(t *testing.T) { b.served(t, "tcp", at(close.Spec.ClusterIP, 80), here...) })
	t.Run("source ranges", func(t *testing.T) {
		b.served(t, "tcp", "192.0.2.93:80", all...)
		b.served(t, "tcp", at(let.Spec.ClusterIP, 80), all...)
		b.served(t, "tcp", at(kept.Spec.ClusterIP, 80), all...)
		b.served(t, "tcp", at(front.String(), kept.Spec.Ports[0].NodePort), all...)
		b.unserved(t, "192.0.2.94:80")
	})
	t.Run("load balancer without node ports", func(t *testing.T) {
		if port := bare.Spec.Ports[0].NodePort; port != 0 {
			t.Fatalf("the apiserver gave it the node port %d", port)
		}
		b.served(t, "tcp", "192.0.2.95:80", all...)
	})
	t.Run("a load balancer that is a proxy", func(t *testing.T) {
		b.served(t, "tcp", "192.0.2.96:80", all...)
		b.served(t, "tcp", at(proxied.Spec.ClusterIP, 80), all...)
		b.unserved(t, "192.0.2.97:80")
	})
	t.Run("addresses that are published unready", func(t *testing.T) {
		b.ready("b2", false)
		b.served(t, "tcp", at(let.Spec.ClusterIP, 80), "b1", "b3")
		b.served(t, "tcp", at(early.Spec.ClusterIP, 80), all...)
	})
}

// balanced makes a Service with addresses of a load balancer, each "ADDRESS" or "ADDRESS Proxy".
func (b *bed) balanced(name, spec string, addresses ...string) *corev1.Service {
	b.t.Helper()
	service := b.service(name, spec)
	for _, text := range addresses {
		ip, mode, is := strings.Cut(text, " ")
		ingress := corev1.LoadBalancerIngress{IP: ip}
		if is {
			ingress.IPMode = (*corev1.LoadBalancerIPMode)(&mode)
		}
		service.Status.LoadBalancer.Ingress = append(service.Status.LoadBalancer.Ingress, ingress)
	}
	service, err := b.client.CoreV1().Services("default").UpdateStatus(within(b.t), service, metav1.UpdateOptions{})
	b.must(err)
	return service
}

// labelled makes a Service with a label.
func (b *bed) labelled(name, spec, label, value string) *corev1.Service {
	b.t.Helper()
	service := b.service(name, spec)
	service.Labels = map[string]string{label: value}
	service, err := b.client.CoreV1().Services("default").Update(within(b.t), service, metav1.UpdateOptions{})
	b.must(err)
	return service
}

// unserved waits until nobody answers at an address, and nobody refuses for a Service: nothing comes back, or an error
// that there is no route.
func (b *bed) unserved(t *testing.T, address string) {
	t.Helper()
	const silence = time.Second
	eventually(t, "nobody answers at "+address, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), silence)
		defer cancel()
		answer, err := lab.Get(ctx, b.Client.HTTPClient(false), address)
		switch {
		case err == nil:
			return fmt.Errorf("%s answers", answer.Backend)
		case strings.Contains(err.Error(), "refused"):
			return err
		}
		return nil
	})
}

// seesTheClient asks once, and the pod must see the client's own address.
func (b *bed) seesTheClient(t *testing.T, address string) {
	t.Helper()
	answer, err := b.ask("tcp", address)
	if err != nil || !strings.HasPrefix(answer.Remote, b.Client.Addr4().String()+":") {
		t.Errorf("the pod sees %q, want the client %s; %v", answer.Remote, b.Client.Addr4(), err)
	}
}

// askInside asks from a program on the node, and returns the backend that answers.
func (b *bed) askInside(address string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	separator := strings.LastIndex(address, ":")
	host := strings.Trim(address[:separator], "[]")
	out, err := b.Balancer.Command(ctx, "bash", "-c", `echo $$ > "$0/cgroup.procs" && exec 3<>"/dev/tcp/$1/$2" && printf 'GET / HTTP/1.0\r\n\r\n' >&3 && cat <&3`,
		b.cgroup, host, address[separator+1:]).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	_, body, _ := strings.Cut(string(out), "\r\n\r\n")
	var answer lab.Answer
	if err := json.Unmarshal([]byte(body), &answer); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return answer.Backend, nil
}

// servedInside is served() from a program on the node.
func (b *bed) servedInside(t *testing.T, address string, by ...string) {
	t.Helper()
	b.answered(t, "from the node, "+address, func() (string, error) { return b.askInside(address) }, by...)
}

// hostPort has a port of the node go to a pod by the kernel's own translation, as CNI's portmap makes it.
func (b *bed) hostPort(t *testing.T) {
	t.Helper()
	front := b.Balancer.Interfaces()[0].IPv4.Addr()
	b.translate(t, front, 8081, b.Backends[1].Addr4())
	b.served(t, "tcp", at(front.String(), 8081), "b2")
}

// rules is the table that translate makes.
const rules = "hostport"

// translate has the node's kernel, with its connection tracking, send packets for a port of the node to a pod's port
// 8080.
func (b *bed) translate(t *testing.T, front netip.Addr, port int32, pod netip.Addr) {
	t.Helper()
	b.translateFrom(t, front, port, pod, "ct status dnat masquerade")
}

// translateFrom is translate with another rule for the source.
func (b *bed) translateFrom(t *testing.T, front netip.Addr, port int32, pod netip.Addr, source string) {
	t.Helper()
	b.nft(t, fmt.Sprintf(`table ip %s {
	chain in { type nat hook prerouting priority dstnat; ip daddr %s tcp dport %d dnat to %s:8080; }
	chain out { type nat hook postrouting priority srcnat; %s; }
}
`, rules, front, port, pod, source))
}

func (b *bed) nft(t *testing.T, script string) {
	t.Helper()
	nft := b.Balancer.Command(within(t), "nft", "-f", "-")
	nft.Stdin = strings.NewReader(script)
	if out, err := nft.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
}

// answersHealth asks at the ports for health from outside.
func (b *bed) answersHealth(t *testing.T, near, away *corev1.Service) {
	t.Helper()
	front := b.Balancer.Interfaces()[0].IPv4.Addr().String()
	want := func(service *corev1.Service, status int, weight string) {
		t.Helper()
		eventually(t, fmt.Sprintf("%s is said to have %s endpoints", service.Name, weight), func() error {
			response, err := b.Client.HTTPClient(false).Get("http://" + at(front, service.Spec.HealthCheckNodePort) + "/")
			if err != nil {
				return err
			}
			defer response.Body.Close()
			if got := response.Header.Get("X-Load-Balancing-Endpoint-Weight"); response.StatusCode != status || got != weight {
				return fmt.Errorf("it answers %s, weight %s", response.Status, got)
			}
			return nil
		})
	}
	want(near, http.StatusOK, "2")
	want(away, http.StatusServiceUnavailable, "0")
	b.ready("b1", false)
	want(near, http.StatusOK, "1")
	b.ready("b1", true)
	want(near, http.StatusOK, "2")
}

// moves asks a Service with an affinity of a second, from the node, with pauses that are longer: in the end another pod
// answers, because sockets are placed by chance. A client at an interface would be placed by its address, and come to the same pod again.
func (b *bed) moves(t *testing.T, address string) {
	t.Helper()
	first, err := b.askInside(address)
	b.must(err)
	b.servedInside(t, address, first) // while it is asked all the time
	const idle = 2 * time.Second
	end := time.After(patience)
	tick := time.NewTicker(idle)
	defer tick.Stop()
	for {
		select {
		case <-end:
			t.Fatalf("after %s it is still %s that answers", patience, first)
		case <-tick.C:
		}
		backend, err := b.askInside(address)
		b.must(err)
		if backend != first {
			return
		}
	}
}
