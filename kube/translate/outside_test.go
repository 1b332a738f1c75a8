package translate_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/shunt-lb/shunt/kube/translate"
)

// TestOutside: external IPs that are for clients outside alone are a service of their own, which sockets do not have
// and pods are denied. The rest is unchanged.
func TestOutside(t *testing.T) {
	pods := here
	pods.Pods = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}
	const text = "externalIPs: [192.0.2.77], type: NodePort, "
	for _, c := range []struct {
		name, spec string
		of         translate.Translator
		want       string
	}{
		{"inside, too", text, translate.Translator{Node: pods}, `
default/web nat rejects
  tcp 10.96.0.10:80
  tcp 192.0.2.77:80
`},
		{"outside alone", text, translate.Translator{Node: pods, Outside: true}, `
default/web nat rejects
  tcp 10.96.0.10:80
default/web@external-ips nat rejects deny=[0.0.0.0/32 ::/128 10.244.1.0/24]
  tcp 192.0.2.77:80
`},
		{"the node says nothing of its pods", text, translate.Translator{Node: here, Outside: true}, `
default/web nat rejects
  tcp 10.96.0.10:80
default/web@external-ips nat rejects deny=[0.0.0.0/32 ::/128]
  tcp 192.0.2.77:80
pod_range_missing Service default/web: external IPs also take packets of pods on node "n1", which has no podCIDR: give the node a podCIDR, or keep others from making Services with externalIPs
`},
		{"without external IPs", "", translate.Translator{Node: here, Outside: true}, `
default/web nat rejects
  tcp 10.96.0.10:80
`},
		{"policy Local: clients inside have no other endpoints there either", text + "externalTrafficPolicy: Local, ", translate.Translator{Node: pods, Outside: true}, `
default/web nat rejects
  tcp 10.96.0.10:80
default/web@external-ips nat-destination rejects deny=[0.0.0.0/32 ::/128 10.244.1.0/24]
  tcp 192.0.2.77:80
`},
	} {
		service, _ := objects(t, strings.Replace(onePort, "type: ClusterIP, ", c.spec, 1))
		got := c.of.Service(service, nil)
		if diff := cmp.Diff(strings.TrimPrefix(c.want, "\n"), dump(got.Services, got.Faults)); diff != "" {
			t.Errorf("%s: -want +got\n%s", c.name, diff)
		}
	}
}

// TestPodRanges: the ranges of both families, or of the field from before dual stack; a text that is no range is a
// fault.
func TestPodRanges(t *testing.T) {
	for _, c := range []struct {
		spec corev1.NodeSpec
		want string
	}{
		{corev1.NodeSpec{PodCIDR: "10.244.1.7/24"}, "10.244.1.0/24"},
		{corev1.NodeSpec{PodCIDR: "10.244.1.0/24", PodCIDRs: []string{"10.244.1.0/24", "fd00:1::/64"}}, "10.244.1.0/24 fd00:1::/64"},
		{corev1.NodeSpec{PodCIDRs: []string{"nonsense", "::ffff:10.0.0.0/120"}}, "object_invalid object_invalid"},
	} {
		node, faults := translate.NodeOf(&corev1.Node{Spec: c.spec})
		var got []string
		for _, p := range node.Pods {
			got = append(got, p.String())
		}
		for _, f := range faults {
			got = append(got, string(f.Code))
		}
		if text := strings.Join(got, " "); text != c.want {
			t.Errorf("%+v: %q, want %q", c.spec, text, c.want)
		}
	}
}
