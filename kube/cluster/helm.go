package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Release is the chart's release that Install makes, in Namespace.
const (
	Release   = "shunt-kube"
	Namespace = "kube-system"
)

// Install installs shunt-kube on the nodes, as users do: `helm upgrade --install`. values override the values that this
// cluster needs. It does not wait for the agents.
func (c *Cluster) Install(ctx context.Context, values map[string]any) error {
	all := map[string]any{
		"image": AgentImage, "imagePullPolicy": "Never", "apiserver": map[string]any{"host": c.Plane.Addr4().String()},
		"cgroup": "/run/cgroup2", // the node's own, because its processes see the machine's tree
	}
	if c.options.CNI == Ptp { // the file cannot name pods' interfaces, and there may be none yet
		all["config"], all["awaitInterfaces"] = map[string]any{"interfaces": []any{map[string]string{"name": "eth0"}, map[string]string{"name": "veth*", "attach": "tc"}}}, []string{}
	}
	for name, value := range values {
		all[name] = value
	}
	var sets []string
	for name, value := range all {
		text, err := json.Marshal(value)
		if err != nil {
			return err
		}
		sets = append(sets, "--set-json", name+"="+string(text))
	}
	return c.helm(ctx, append([]string{"upgrade", "--install", Release, c.options.Chart}, sets...)...)
}

// Uninstall undoes Install, and waits until no agent runs.
func (c *Cluster) Uninstall(ctx context.Context) error {
	if err := c.helm(ctx, "uninstall", Release); err != nil {
		return err
	}
	return Eventually(ctx, func() error {
		pods, err := c.pods(ctx, Namespace, "shunt-kube")
		if err == nil && len(pods) > 0 {
			err = fmt.Errorf("%d pods of shunt-kube are still there", len(pods))
		}
		return err
	})
}

// Remains lists the objects of shunt-kube in the apiserver, and its programs and files on nodes, that Uninstall has left.
// The list should be empty.
func (c *Cluster) Remains(ctx context.Context) (all []string, err error) {
	for _, path := range []string{"/apis/apps/v1/daemonsets", "/apis/apps/v1/controllerrevisions", "/apis/rbac.authorization.k8s.io/v1/roles",
		"/apis/rbac.authorization.k8s.io/v1/rolebindings", "/apis/rbac.authorization.k8s.io/v1/clusterroles", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
		"/apis/coordination.k8s.io/v1/leases", "/apis/discovery.k8s.io/v1/endpointslices", "/api/v1/services", "/api/v1/configmaps", "/api/v1/secrets", "/api/v1/serviceaccounts", "/api/v1/pods"} {
		list := &metav1.PartialObjectMetadataList{}
		text, err := c.Client.CoreV1().RESTClient().Get().AbsPath(path).DoRaw(ctx)
		if err == nil {
			err = json.Unmarshal(text, list)
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", path, err)
		}
		for _, object := range list.Items {
			if strings.Contains(object.Name, Release) {
				all = append(all, path+" "+object.Name)
			}
		}
	}
	for _, n := range c.Nodes {
		text, err := os.ReadFile(c.in(n.Name(), "init.pid"))
		if err != nil {
			return nil, err
		}
		root := filepath.Join("/proc", strings.TrimSpace(string(text)), "root")
		// The folders themselves belong to kubelet, which made them for the volumes.
		for _, pattern := range []string{"sys/fs/bpf/*", "run/shunt/*", "var/lib/shunt/*"} {
			found, err := filepath.Glob(filepath.Join(root, pattern))
			if err != nil {
				return nil, err
			}
			for _, file := range found {
				if strings.HasSuffix(file, ".debug") {
					continue // made by the kernel in every bpffs (kernel/bpf/inode.c, populate_bpffs)
				}
				all = append(all, n.Name()+": "+strings.TrimPrefix(file, root))
			}
		}
		interfaces := []string{"eth0"}
		if c.options.CNI == Bridge {
			interfaces = append(interfaces, "cni0")
		}
		for _, name := range interfaces {
			about, err := n.Command(ctx, "ip", "-details", "link", "show", name).Output()
			if err != nil {
				return nil, fmt.Errorf("%s: look at %s: %w", n.Name(), name, err)
			}
			if strings.Contains(string(about), "xdp") {
				all = append(all, fmt.Sprintf("%s: a program at %s: %s", n.Name(), name, about))
			}
		}
	}
	return all, nil
}

// helm runs Helm in a network namespace that reaches the apiserver. Its own files go to the cluster's folder.
func (c *Cluster) helm(ctx context.Context, args ...string) error {
	command := c.Plane.Command(ctx, c.options.Helm, append(args, "--namespace", Namespace, "--kubeconfig", c.Kubeconfig())...)
	command.Env = append(command.Environ(), "HELM_CACHE_HOME="+c.in("helm"), "HELM_CONFIG_HOME="+c.in("helm"), "HELM_DATA_HOME="+c.in("helm"))
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("helm %s: %w:\n%s", args[0], err, output)
	}
	return nil
}
