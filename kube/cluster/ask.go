package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/shunt-lb/shunt/internal/lab"
)

// Client is the place that a question comes from.
type Client struct {
	Name string
	// Ask asks a server at a literal address once, over a new connection or from a new socket.
	Ask func(ctx context.Context, network, address string) (lab.Answer, error)
}

// answerTimeout limits the wait for one answer.
const answerTimeout = 3 * time.Second

// FromOutside returns a client that is no part of the cluster.
func (c *Cluster) FromOutside() Client {
	return Client{"outside", func(ctx context.Context, network, address string) (lab.Answer, error) {
		ctx, cancel := context.WithTimeout(ctx, answerTimeout)
		defer cancel()
		if network == "udp" {
			return c.Outside.AskUDP(ctx, address, []byte("who?"))
		}
		return lab.Get(ctx, c.Outside.HTTPClient(false), address)
	}}
}

// From returns a client in a pod of Serve, or on a node if the pod is in the node's network.
func (c *Cluster) From(pod *corev1.Pod) Client {
	name := "pod " + pod.Name
	if pod.Spec.HostNetwork {
		name = "node " + pod.Spec.NodeName
	}
	return Client{name, func(ctx context.Context, network, address string) (lab.Answer, error) {
		var answer lab.Answer
		text, err := c.tell(ctx, pod, "/ask", url.Values{"network": {network}, "address": {address}})
		if err == nil {
			err = json.Unmarshal(text, &answer)
		}
		return answer, err
	}}
}

// tell sends a pod of Serve an order that takes no longer than an answer, and returns its answer.
func (c *Cluster) tell(ctx context.Context, pod *corev1.Pod, path string, what url.Values) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*answerTimeout)
	defer cancel()
	return c.have(ctx, pod, path, what)
}

// have does the same as tell for an order that may take as long as ctx.
func (c *Cluster) have(ctx context.Context, pod *corev1.Pod, path string, what url.Values) ([]byte, error) {
	where := url.URL{Scheme: "http", Host: pod.Status.PodIP + ":8080", Path: path, RawQuery: what.Encode()}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, where.String(), nil)
	if err != nil {
		return nil, err
	}
	response, err := c.Plane.HTTPClient(false).Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s", strings.TrimSpace(string(text)))
	}
	return text, err
}

// Hold opens a TCP connection from a pod of Serve, which stays open. again asks once more on it.
func (c *Cluster) Hold(ctx context.Context, pod *corev1.Pod, address string) (again func(context.Context) (lab.Answer, error), err error) {
	number, err := c.tell(ctx, pod, "/hold", url.Values{"address": {address}})
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) (answer lab.Answer, err error) {
		text, err := c.tell(ctx, pod, "/held", url.Values{"connection": {string(number)}})
		if err == nil {
			err = json.Unmarshal(text, &answer)
		}
		return answer, err
	}, nil
}

// Served waits until only these servers answer at an address: each of many requests is answered by one of
// them, and each of them answers at least once. It returns the number of answers of each.
func (from Client) Served(ctx context.Context, network, address string, by ...string) (seen map[string]int, err error) {
	const requests = 24 // one of three servers not among them: once in 6,000 times, and then it is asked again
	err = Eventually(ctx, func() error {
		seen = map[string]int{}
		for range requests {
			answer, err := from.Ask(ctx, network, address)
			if err != nil {
				return fmt.Errorf("%s asks %s %s: after %v: %w", from.Name, network, address, seen, err)
			}
			seen[answer.Backend]++
		}
		for _, name := range by {
			if seen[name] == 0 || len(seen) != len(by) {
				return fmt.Errorf("%s asks %s %s, and is answered by %v; want %v", from.Name, network, address, seen, by)
			}
		}
		return nil
	})
	return seen, err
}

// Service makes a Service from its spec in YAML, and returns it as the apiserver completed it. outer are
// addresses that an outer load balancer would report; there may be none.
func (c *Cluster) Service(ctx context.Context, name, spec string, outer ...netip.Addr) (*corev1.Service, error) {
	service := &corev1.Service{}
	if err := yaml.UnmarshalStrict([]byte("spec: {"+spec+"}"), service); err != nil {
		return nil, fmt.Errorf("read the spec of Service %s: %w", name, err)
	}
	service.Namespace, service.Name = "default", name
	services := c.Client.CoreV1().Services("default")
	service, err := services.Create(ctx, service, metav1.CreateOptions{})
	if err != nil || len(outer) == 0 {
		return service, err
	}
	for _, address := range outer {
		service.Status.LoadBalancer.Ingress = append(service.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: address.String()})
	}
	return services.UpdateStatus(ctx, service, metav1.UpdateOptions{})
}

// At returns an address and a port as text.
func At(address string, port int32) string {
	return netip.AddrPortFrom(netip.MustParseAddr(address), uint16(port)).String()
}

// Names returns the names that the pods' servers answer with: in the node's network that is the node's name.
func Names(pods []corev1.Pod) (names []string) {
	for _, pod := range pods {
		if pod.Spec.HostNetwork {
			names = append(names, pod.Spec.NodeName)
			continue
		}
		names = append(names, pod.Name)
	}
	return names
}
