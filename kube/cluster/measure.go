package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/shunt-lb/shunt/kube/cluster/meter"
)

// Measure makes a pod of ServeLoad send to an address.
func (c *Cluster) Measure(ctx context.Context, pod *corev1.Pod, kind traffic.Kind, to netip.AddrPort, duration time.Duration) (s meter.Sample, err error) {
	text, err := c.have(ctx, pod, "/measure", url.Values{"kind": {string(kind)}, "address": {to.String()}, "duration": {duration.String()}})
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	return s, err
}

// Until makes a pod of ServeLoad open connections until they go to a backend. It is an error if they do not within the limit.
func (c *Cluster) Until(ctx context.Context, pod *corev1.Pod, address, backend string, limit time.Duration) (t meter.Turn, err error) {
	text, err := c.have(ctx, pod, "/until", url.Values{"address": {address}, "backend": {backend}, "limit": {limit.String()}})
	if err == nil {
		err = json.Unmarshal(text, &t)
	}
	return t, err
}

// Point makes the EndpointSlice of a Service without a selector, with these pods. ports are their ports by the names of the Service's.
func (c *Cluster) Point(ctx context.Context, service *corev1.Service, ports map[string]int32, pods ...corev1.Pod) error {
	slice := sliceOf(service, ports, pods)
	if _, err := c.Client.DiscoveryV1().EndpointSlices(slice.Namespace).Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("give Service %s endpoints: %w", service.Name, err)
	}
	return nil
}

// Repoint changes the EndpointSlice that Point has made.
func (c *Cluster) Repoint(ctx context.Context, service *corev1.Service, ports map[string]int32, pods ...corev1.Pod) error {
	slice := sliceOf(service, ports, pods)
	if _, err := c.Client.DiscoveryV1().EndpointSlices(slice.Namespace).Update(ctx, slice, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("give Service %s other endpoints: %w", service.Name, err)
	}
	return nil
}

func sliceOf(service *corev1.Service, ports map[string]int32, pods []corev1.Pod) *discoveryv1.EndpointSlice {
	slice := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, ObjectMeta: metav1.ObjectMeta{Name: service.Name, Namespace: service.Namespace,
		Labels: map[string]string{discoveryv1.LabelServiceName: service.Name, discoveryv1.LabelManagedBy: "shunt-cluster"}}}
	for _, p := range service.Spec.Ports {
		number := ports[p.Name]
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &p.Name, Port: &number, Protocol: &p.Protocol})
	}
	ready := true
	for _, pod := range pods {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{pod.Status.PodIP}, NodeName: &pod.Spec.NodeName,
			Conditions: discoveryv1.EndpointConditions{Ready: &ready}})
	}
	return slice
}

// ForgetConnections empties the nodes' tables of connection tracking.
func (c *Cluster) ForgetConnections() error {
	var failures []error
	for _, n := range c.Nodes {
		failures = append(failures, n.Run(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
	}
	if err := errors.Join(failures...); err != nil {
		return fmt.Errorf("empty the tables of connection tracking: %w", err)
	}
	return nil
}
