package pool

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/shunt-lb/shunt/kube/translate"
)

// all are the addresses of a pool, up to a few.
func all(p Pool) (list []string) {
	const few = 4
	for _, is4 := range []bool{true, false} {
		n := 0
		for a := range p.addresses(is4) {
			if n++; n > few {
				return append(list, "…")
			}
			list = append(list, a.String())
		}
	}
	return list
}

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"":                                "",
		"192.0.2.7":                       "192.0.2.7",
		"192.0.2.7/32":                    "192.0.2.7",
		"192.0.2.6/31":                    "192.0.2.6 192.0.2.7",
		"192.0.2.8/30":                    "192.0.2.9 192.0.2.10",
		"192.0.2.8-192.0.2.10":            "192.0.2.8 192.0.2.9 192.0.2.10",
		"2001:db8::8/126":                 "2001:db8::9 2001:db8::a 2001:db8::b",
		"2001:db8::/64":                   "2001:db8::1 2001:db8::2 2001:db8::3 2001:db8::4 …",
		"192.0.2.9, 192.0.2.1-192.0.2.2":  "192.0.2.9 192.0.2.1 192.0.2.2",
		"2001:db8::7,192.0.2.7":           "192.0.2.7 2001:db8::7",
		"255.255.255.254-255.255.255.255": "error: no address that clients can send packets to",
		"192.0.2.7/24":                    "error: the prefix of that length is 192.0.2.0/24",
		"192.0.2.9-192.0.2.8":             "error: it ends before it begins",
		"192.0.2.9-2001:db8::1":           "error: it begins in one family and ends in the other",
		"192.0.2.8/30,192.0.2.10":         "error: the ranges 192.0.2.8/30 and 192.0.2.10 have addresses in common",
		"192.0.2.8,192.0.2.0/24":          "error: the ranges 192.0.2.8 and 192.0.2.0/24 have addresses in common",
		"fe80::1%eth0":                    "error: no address that clients can send packets to",
		"::ffff:192.0.2.1":                "error: no address that clients can send packets to",
		"127.0.0.1":                       "error: no address that clients can send packets to",
		"100.0.0.0-200.0.0.0":             "error: it has 127.0.0.0, which is no address",
		"::/0":                            "error: ::1 is no address that clients",
		"eth0":                            `error: "eth0" is no range of addresses`,
		"192.0.2.1-":                      "error: is no range of addresses",
	} {
		var texts []string
		if text != "" {
			texts = strings.Split(text, ",")
		}
		p, err := Parse(texts)
		says, fails := strings.CutPrefix(want, "error: ")
		switch {
		case fails && (err == nil || !strings.Contains(err.Error(), says)):
			t.Errorf("%q: the error is %v, want %q", text, err, says)
		case !fails && err != nil:
			t.Errorf("%q: %v", text, err)
		case !fails && strings.Join(all(p), " ") != want:
			t.Errorf("%q has %v, want %s", text, all(p), want)
		case !fails && p.Empty() != (text == ""):
			t.Errorf("%q is empty: %t", text, p.Empty())
		}
	}
}

// TestWithin: a pool is within networks if each of its ranges is in one of them.
func TestWithin(t *testing.T) {
	for _, c := range []struct {
		pool, networks string
		want           bool
	}{
		{"192.0.2.240-192.0.2.250", "192.0.2.0/24", true},
		{"192.0.2.240-192.0.2.250", "198.51.100.0/24 192.0.2.7/24", true},
		{"192.0.2.240-192.0.3.5", "192.0.2.0/24 192.0.3.0/24", false},
		{"192.0.2.0/24", "192.0.2.0/25", false},
		{"192.0.2.1,2001:db8::1", "192.0.2.0/24", false},
		{"192.0.2.1,2001:db8::1", "192.0.2.0/24 2001:db8::/64", true},
		{"192.0.2.1", "", false},
	} {
		p, err := Parse(strings.Split(c.pool, ","))
		if err != nil {
			t.Fatal(err)
		}
		var networks []netip.Prefix
		for text := range strings.FieldsSeq(c.networks) {
			networks = append(networks, netip.MustParsePrefix(text))
		}
		if got := p.Within(networks); got != c.want {
			t.Errorf("%s is within %q: %v", c.pool, c.networks, got)
		}
	}
}

// FuzzParse: a pool that is accepted has its ends, and can be written again.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"192.0.2.8/30", "192.0.2.8-192.0.2.10,2001:db8::/64", "::/0", "0.0.0.0/0", "1-2", "ffff::-ffff::"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := Parse(strings.Split(text, ","))
		if err != nil {
			return
		}
		again, err := Parse(strings.Split(p.String(), ","))
		if err != nil || again.String() != p.String() {
			t.Errorf("%q is %q, and again %q, %v", text, p, again, err)
		}
		for _, s := range p.ranges {
			if !usable(s.first) || !usable(s.last) || s.last.Less(s.first) || !p.Contains(s.first) || !p.Contains(s.last) || p.Contains(s.last.Next()) && len(p.ranges) == 1 {
				t.Errorf("%q has %s-%s", text, s.first, s.last)
			}
		}
	})
}

// service is a Service of type LoadBalancer, made at a second, with more of its spec and these addresses in its status.
func service(t *testing.T, name string, second int64, spec string, addresses ...string) *corev1.Service {
	t.Helper()
	s := &corev1.Service{}
	if err := yaml.UnmarshalStrict([]byte("spec: {"+spec+"}"), s); err != nil {
		t.Fatal(err)
	}
	s.Namespace, s.Name, s.CreationTimestamp = "a", name, metav1.Unix(second, 0)
	if s.Spec.Type == "" {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
	}
	if s.Spec.IPFamilies == nil {
		s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	}
	s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.1", []string{"10.96.0.1"}
	for _, text := range addresses {
		ip, mode, is := strings.Cut(text, " ")
		ingress := corev1.LoadBalancerIngress{IP: ip}
		if is {
			ingress.IPMode = (*corev1.LoadBalancerIPMode)(&mode)
		}
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, ingress)
	}
	return s
}

var ours = (&translate.Translator{}).Balances

// TestPlan: the Services that get each address, and the Services that get none.
func TestPlan(t *testing.T) {
	const both = "ipFamilies: [IPv6, IPv4], ipFamilyPolicy: "
	for _, c := range []struct {
		name, pool string
		services   []*corev1.Service
		want       string
	}{
		{"the older one first, then by name", "192.0.2.1-192.0.2.9", []*corev1.Service{service(t, "z", 2, ""), service(t, "y", 1, ""), service(t, "x", 2, "")},
			"a/y [192.0.2.1]; a/x [192.0.2.2]; a/z [192.0.2.3]"},
		{"one that has an address keeps it, though an older one waits", "192.0.2.1", []*corev1.Service{service(t, "old", 1, ""), service(t, "new", 2, "", "192.0.2.1")},
			"pool_exhausted a/old it gets no IPv4 address: none of the pool's is free"},
		{"addresses of other load balancers, and external IPs, are not free", "192.0.2.1-192.0.2.3", []*corev1.Service{
			service(t, "x", 1, ""), service(t, "y", 2, "loadBalancerClass: example.org/other", "192.0.2.1"), service(t, "z", 3, "type: ClusterIP, externalIPs: [192.0.2.2]")},
			"a/x [192.0.2.3]"},
		{"what is left in the status of another type is free", "192.0.2.1", []*corev1.Service{service(t, "x", 1, "type: NodePort", "192.0.2.1"), service(t, "y", 2, "")}, "a/y [192.0.2.1]"},
		{"own class, and others' Services", "192.0.2.1-192.0.2.9", []*corev1.Service{
			service(t, "own", 1, "loadBalancerClass: "+translate.OwnClass), service(t, "other", 2, "loadBalancerClass: example.org/other"),
			service(t, "unset", 3, ""), service(t, "proxied", 4, "", "192.0.2.7 Proxy")}, "a/own [192.0.2.1]; a/unset [192.0.2.2]"},
		{"both families, in the Service's order", "192.0.2.1,2001:db8::1", []*corev1.Service{service(t, "x", 1, both+"RequireDualStack")}, "a/x [2001:db8::1 192.0.2.1]"},
		{"one that has one family gets the other", "192.0.2.1,2001:db8::1", []*corev1.Service{service(t, "x", 1, both+"RequireDualStack", "192.0.2.1")}, "a/x [2001:db8::1]"},
		{"both families if there are both", "192.0.2.1", []*corev1.Service{service(t, "x", 1, both+"PreferDualStack")}, "a/x [192.0.2.1]"},
		{"both families are required", "192.0.2.1", []*corev1.Service{service(t, "x", 1, both+"RequireDualStack")},
			"a/x [192.0.2.1]; pool_exhausted a/x it gets no IPv6 address: the pool has none of this family"},
		{"a family that the pool does not have", "192.0.2.1", []*corev1.Service{service(t, "x", 1, "ipFamilies: [IPv6], ipFamilyPolicy: PreferDualStack")},
			"pool_exhausted a/x it gets no IPv6 address: the pool has none of this family"},
		{"none is free of the second family", "192.0.2.1-192.0.2.2,2001:db8::1", []*corev1.Service{service(t, "x", 1, both+"PreferDualStack"), service(t, "y", 2, both+"PreferDualStack")},
			"a/x [2001:db8::1 192.0.2.1]; a/y [192.0.2.2]; pool_exhausted a/y it gets no IPv6 address: none of the pool's is free"},
		{"a pool that has shrunk", "192.0.2.1", []*corev1.Service{service(t, "x", 1, "", "192.0.2.7")},
			"address_outside_pool a/x its address 192.0.2.7 is not in the pool: it keeps the address"},
		{"an address that it asks for", "192.0.2.1-192.0.2.9", []*corev1.Service{service(t, "x", 1, ""), service(t, "y", 2, "loadBalancerIP: 192.0.2.5")}, "a/x [192.0.2.1]; a/y [192.0.2.5]"},
		{"it asks for one of two families", "192.0.2.1-192.0.2.9,2001:db8::1", []*corev1.Service{service(t, "x", 1, both+"RequireDualStack, loadBalancerIP: 192.0.2.5")}, "a/x [2001:db8::1 192.0.2.5]"},
		{"it asks for one that another has", "192.0.2.1-192.0.2.9", []*corev1.Service{service(t, "x", 1, "loadBalancerIP: 192.0.2.5"), service(t, "y", 2, "", "192.0.2.5")},
			"address_refused a/x it asks for the address 192.0.2.5, which Service a/y has"},
		{"it asks for one that the pool does not have", "192.0.2.1", []*corev1.Service{service(t, "x", 1, "loadBalancerIP: 192.0.2.5")},
			"address_refused a/x it asks for the address 192.0.2.5, which is not in the pool"},
		{"it asks for one of another family", "192.0.2.1,2001:db8::1", []*corev1.Service{service(t, "x", 1, "loadBalancerIP: '2001:db8::1'")},
			"address_refused a/x it asks for the address 2001:db8::1, and its ipFamilies do not have IPv6"},
		{"it asks for nonsense", "192.0.2.1", []*corev1.Service{service(t, "x", 1, "loadBalancerIP: soon")}, `address_refused a/x it asks for the address "soon", which is no address`},
		{"it has what it asks for", "192.0.2.1", []*corev1.Service{service(t, "x", 1, "loadBalancerIP: 192.0.2.1", "192.0.2.1")}, ""},
		{"it asks for another one than it has", "192.0.2.1-192.0.2.9", []*corev1.Service{service(t, "x", 1, "loadBalancerIP: 192.0.2.5", "192.0.2.1")},
			"address_refused a/x it asks for the address 192.0.2.5, and keeps 192.0.2.1, which it has"},
	} {
		p, err := Parse(strings.Split(c.pool, ","))
		if err != nil {
			t.Fatal(err)
		}
		slices.Reverse(c.services) // the order of a map
		var before []*corev1.Service
		for _, s := range c.services {
			before = append(before, s.DeepCopy())
		}
		gifts, faults := p.Plan(c.services, ours)
		var got []string
		for _, g := range gifts {
			got = append(got, fmt.Sprint(key(g.Service), " ", g.Addresses))
		}
		for _, f := range faults {
			got = append(got, fmt.Sprint(f.Code, " ", strings.TrimPrefix(f.Object, "Service "), " ", f.Text))
		}
		if text := strings.Join(got, "; "); text != c.want {
			t.Errorf("%s: %s\nwant %s", c.name, text, c.want)
		}
		for i, s := range c.services {
			if s.String() != before[i].String() {
				t.Errorf("%s: Service %s was changed", c.name, s.Name)
			}
		}
	}
}

// TestPlanOfADyingService: it keeps its addresses until it is gone, and gets none.
func TestPlanOfADyingService(t *testing.T) {
	p, err := Parse([]string{"192.0.2.1-192.0.2.3"})
	if err != nil {
		t.Fatal(err)
	}
	has, waits := service(t, "has", 1, "", "192.0.2.1"), service(t, "waits", 2, "")
	has.DeletionTimestamp, waits.DeletionTimestamp = &metav1.Time{}, &metav1.Time{}
	gifts, _ := p.Plan([]*corev1.Service{has, waits, service(t, "new", 3, "")}, ours)
	if len(gifts) != 1 || gifts[0].Service.Name != "new" || slices.Contains(gifts[0].Addresses, netip.MustParseAddr("192.0.2.1")) {
		t.Errorf("the gifts are %+v", gifts)
	}
}
