package cluster

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestChart renders the chart: which objects, arguments and variables the values give.
func TestChart(t *testing.T) {
	helm := os.Getenv("SHUNT_KUBE_HELM")
	if helm == "" {
		t.Skip("SHUNT_KUBE_HELM is not set: `make test-kube` builds Helm, and runs this")
	}
	const (
		service   = "\nkind: Service\nmetadata: {name: shunt-kube, namespace: kube-system}\n"
		agents    = "{name: AGENTS, value: kube-system/shunt-kube}"
		networks  = "{name: LOAD_BALANCER_NETWORKS, value: kube-system/shunt-kube-networks}"
		noElect   = `{name: LOAD_BALANCER_ELECT, value: "false"}`
		tunnels   = "{name: DIRECT_RETURN_TUNNELS, value: kube-system/shunt-kube-tunnels}"
		tunnelMap = "\nkind: ConfigMap\nmetadata: {name: shunt-kube-tunnels, namespace: kube-system}\n---" // and no data, or an upgrade would remove the agents' entries
		role      = "resourceNames: [shunt-kube-tunnels]"
		rights    = "roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: shunt-kube-tunnels}"
		gue, ipip = "\n            - --direct-return=gue ", "\n            - --direct-return=ipip "
		gueToo    = `{name: DIRECT_RETURN, value: "gue"}`
		ipipToo   = `{name: DIRECT_RETURN, value: "ipip"}`
		moving    = `{name: MOVING, value: "true"}`
		outside   = `{name: EXTERNAL_IPS_INSIDE, value: "false"}`
	)
	all := []string{service, agents, networks, noElect, tunnels, tunnelMap, role, rights, gue, ipip, gueToo, ipipToo, moving, outside}
	const pool = "loadBalancer.pool={192.0.2.0/24}"
	for values, wants := range map[string][]string{
		"":                                     nil,
		"directReturn=":                        nil,
		"moving=true":                          {moving},
		"externalIPsInside=false":              {outside},
		pool:                                   {service, agents, networks},
		pool + ",loadBalancer.elect=false":     {noElect},
		"directReturn=gue":                     {service, agents, tunnels, tunnelMap, role, rights, gue, gueToo},
		"directReturn=ipip,loadBalancer.pool=": {service, agents, tunnels, tunnelMap, role, rights, ipip, ipipToo},
		"directReturn=gue," + pool:             {service, agents, networks, tunnels, tunnelMap, role, rights, gue, gueToo},
		"directReturn=gue,loadBalancer.elect=false," + pool: {service, agents, noElect, tunnels, tunnelMap, role, rights, gue, gueToo},
	} {
		text := must(render(t, helm, values))(t)
		for _, part := range all {
			wanted := false
			for _, want := range wants {
				wanted = wanted || part == want
			}
			if has := strings.Count(text, part); has > 1 || (has == 1) != wanted {
				t.Errorf("with %q, %q is there %d times, wanted %t", values, part, has, wanted)
			}
		}
	}
	for _, word := range []string{"vxlan", "true", "GUE"} {
		if text, err := render(t, helm, "directReturn="+word); err == nil || !strings.Contains(text, "directReturn: "+word+" is no kind of tunnel: write gue, ipip, or \"\" for none") {
			t.Errorf("directReturn=%s: %v\n%s", word, err, text)
		}
	}
}

// render returns all objects that an installation with these values would make, or Helm's message.
func render(t *testing.T, helm, values string) (string, error) {
	folder := t.TempDir()
	command := exec.Command(helm, "template", Release, "../../deploy/helm/shunt-kube", "--namespace", Namespace, "--kube-version", "1.34.0", "--set", "image=i,apiserver.host=a,"+values)
	command.Env = append(command.Environ(), "HELM_CACHE_HOME="+folder, "HELM_CONFIG_HOME="+folder, "HELM_DATA_HOME="+folder)
	text, err := command.CombinedOutput()
	return string(text), err
}
