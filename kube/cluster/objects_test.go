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
		more       string
		command    []string
		privileged bool
	}{
		"a server":        {"", nil, false},
		"an end of loads": {loadKeys, []string{"/pod", "load"}, true},
	} {
		set := &appsv1.DaemonSet{}
		if err := yaml.UnmarshalStrict(fmt.Appendf(nil, daemons, "web", false, x.more), set); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		c := set.Spec.Template.Spec.Containers[0]
		privileged := c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
		if !slices.Equal(c.Command, x.command) || privileged != x.privileged || c.ReadinessProbe == nil || c.Image != PodImage {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// TestUnknownCNI is refused before anything is made.
func TestUnknownCNI(t *testing.T) {
	if c, err := Up(t.Context(), Options{CNI: "calico"}); err == nil || c != nil || !strings.Contains(err.Error(), `"calico" is neither bridge nor ptp`) {
		t.Errorf("Up returned %v, %v", c, err)
	}
}
