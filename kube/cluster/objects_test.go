package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"
)

// TestDaemons: the apiserver can read the manifests of servers.
func TestDaemons(t *testing.T) {
	for name, x := range map[string]struct {
		ofPod, ofContainer string
		command            []string
		privileged         bool
		class              string
	}{
		"a server":           {"hostNetwork: true", "", nil, false, ""},
		"an end of loads":    {"hostNetwork: false", loadKeys, []string{"/pod", "load"}, true, ""},
		"a server in gVisor": {sandboxKeys, "", nil, false, "gvisor"},
	} {
		set := &appsv1.DaemonSet{}
		if err := yaml.UnmarshalStrict(fmt.Appendf(nil, daemons, "web", x.ofPod, x.ofContainer), set); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		pod := set.Spec.Template.Spec
		c := pod.Containers[0]
		privileged := c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
		if !slices.Equal(c.Command, x.command) || privileged != x.privileged || c.ReadinessProbe == nil || c.Image != PodImage ||
			pod.HostNetwork != (name == "a server") || (x.class != "") != (pod.RuntimeClassName != nil) || x.class != "" && *pod.RuntimeClassName != x.class {
			t.Errorf("%s: %+v", name, pod)
		}
	}
}

// TestUnknownCNI is refused before anything is made.
func TestUnknownCNI(t *testing.T) {
	if c, err := Up(t.Context(), Options{CNI: "calico"}); err == nil || c != nil || !strings.Contains(err.Error(), `"calico" is neither bridge nor ptp`) {
		t.Errorf("Up returned %v, %v", c, err)
	}
}
