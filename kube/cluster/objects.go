package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
)

// kinds are the API paths of the objects that Apply knows, by kind.
var kinds = map[string]string{
	"DaemonSet": "/apis/apps/v1/namespaces/%s/daemonsets", "Deployment": "/apis/apps/v1/namespaces/%s/deployments",
	"RuntimeClass": "/apis/node.k8s.io/v1/runtimeclasses",
}

// Apply makes objects, or changes existing ones, as `kubectl apply --server-side` does.
func (c *Cluster) Apply(ctx context.Context, manifest string) error {
	for part := range strings.SplitSeq(manifest, "\n---\n") {
		object := &metav1.PartialObjectMetadata{}
		if err := yaml.Unmarshal([]byte(part), object); err != nil {
			return fmt.Errorf("read a manifest: %w", err)
		}
		path, known := kinds[object.Kind]
		if !known {
			return fmt.Errorf("apply %s %s: nobody has said where such objects are", object.Kind, object.Name)
		}
		if strings.Contains(path, "%s") {
			path = fmt.Sprintf(path, object.Namespace)
		}
		err := c.Client.CoreV1().RESTClient().Patch(types.ApplyYAMLPatchType).AbsPath(path, object.Name).
			Param("fieldManager", "shunt-cluster").Param("force", "true").Body([]byte(part)).Do(ctx).Error()
		if err != nil {
			return fmt.Errorf("apply %s %s: %w", object.Kind, object.Name, err)
		}
	}
	return nil
}

// AwaitAgents waits until shunt-kube is in step with the cluster on all nodes of the last Install, with its settings.
func (c *Cluster) AwaitAgents(ctx context.Context) error {
	return Eventually(ctx, func() error {
		set, err := c.Client.AppsV1().DaemonSets(Namespace).Get(ctx, Release, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s := set.Status
		if s.ObservedGeneration < set.Generation || s.DesiredNumberScheduled == 0 || s.UpdatedNumberScheduled != s.DesiredNumberScheduled {
			return fmt.Errorf("%d of %d nodes have the agent that was asked for", s.UpdatedNumberScheduled, s.DesiredNumberScheduled)
		}
		pods, err := c.pods(ctx, "kube-system", "shunt-kube")
		if err != nil {
			return err
		}
		if len(pods) != int(s.DesiredNumberScheduled) {
			return fmt.Errorf("%d of %d nodes have a pod of shunt-kube", len(pods), s.DesiredNumberScheduled)
		}
		for _, pod := range pods {
			if !slices.ContainsFunc(pod.Status.Conditions, func(p corev1.PodCondition) bool { return p.Type == corev1.PodReady && p.Status == corev1.ConditionTrue }) {
				return fmt.Errorf("shunt-kube on %s is not in step; %s:\n%s", pod.Spec.NodeName, pod.Status.Phase, c.Log(ctx, &pod))
			}
		}
		return nil
	})
}

// Log returns the output of a pod.
func (c *Cluster) Log(ctx context.Context, pod *corev1.Pod) string {
	text, err := c.Client.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{}).DoRaw(ctx)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func (c *Cluster) pods(ctx context.Context, namespace, app string) ([]corev1.Pod, error) {
	list, err := c.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: labels.Set{"app": app}.String()})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// daemons is a manifest of a server on each node, with additional keys of its pod, and of its container.
const daemons = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: %[1]s, namespace: default}
spec:
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      %[2]s
      terminationGracePeriodSeconds: 1
      containers:
        - name: pod
          image: ` + PodImage + `
          imagePullPolicy: Never
%[3]s          readinessProbe: {httpGet: {port: 8080, path: /}, periodSeconds: 1}
`

// Serve runs a server on each node, and waits until all are ready. It returns their pods in the order of the nodes.
func (c *Cluster) Serve(ctx context.Context, app string, hostNetwork bool) ([]corev1.Pod, error) {
	return c.serve(ctx, app, fmt.Sprintf("hostNetwork: %t", hostNetwork), "")
}

// ServeSandboxed is Serve in pods' networks, with servers in gVisor: its sockets and its network stack are no part of the node's
// kernel, which sees only packets of such a pod.
func (c *Cluster) ServeSandboxed(ctx context.Context, app string) ([]corev1.Pod, error) {
	err := c.Apply(ctx, "apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata: {name: gvisor}\nhandler: runsc\n")
	if err != nil {
		return nil, err
	}
	return c.serve(ctx, app, sandboxKeys, "")
}

const sandboxKeys = "runtimeClassName: gvisor"

// ServeLoad does the same in pods' networks, with servers that are also ends of loads (package meter). They change a setting of their
// own network namespace.
func (c *Cluster) ServeLoad(ctx context.Context, app string) ([]corev1.Pod, error) {
	return c.serve(ctx, app, "hostNetwork: false", loadKeys)
}

const loadKeys = "          command: [/pod, load]\n          securityContext: {privileged: true}\n"

func (c *Cluster) serve(ctx context.Context, app, ofPod, ofContainer string) ([]corev1.Pod, error) {
	if err := c.Apply(ctx, fmt.Sprintf(daemons, app, ofPod, ofContainer)); err != nil {
		return nil, err
	}
	if err := c.awaitDaemons(ctx, "default", app); err != nil {
		return nil, err
	}
	pods, err := c.pods(ctx, "default", app)
	if err != nil {
		return nil, err
	}
	inOrder := make([]corev1.Pod, len(c.Nodes))
	for _, pod := range pods {
		for i, n := range c.Nodes {
			if pod.Spec.NodeName == n.Name() {
				inOrder[i] = pod
			}
		}
	}
	return inOrder, nil
}

// awaitDaemons waits until a DaemonSet's pod is ready on each node.
func (c *Cluster) awaitDaemons(ctx context.Context, namespace, name string) error {
	return Eventually(ctx, func() error {
		set, err := c.Client.AppsV1().DaemonSets(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if int(set.Status.NumberReady) != len(c.Nodes) {
			return fmt.Errorf("%d of %d pods of %s are ready\n%s", set.Status.NumberReady, len(c.Nodes), name, c.warnings(ctx, namespace, name))
		}
		return nil
	})
}

// warnings are the last ones of the pods of a DaemonSet, a line each.
func (c *Cluster) warnings(ctx context.Context, namespace, name string) string {
	events, err := c.Client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "type=Warning,involvedObject.kind=Pod"})
	if err != nil {
		return err.Error()
	}
	last := map[string]string{}
	for _, e := range events.Items {
		if pod := e.InvolvedObject.Name; strings.HasPrefix(pod, name+"-") {
			last[pod+" "+e.Reason] = fmt.Sprintf("%s: %s: %s\n", pod, e.Reason, e.Message)
		}
	}
	return strings.Join(slices.Sorted(maps.Values(last)), "")
}

// label gives a pod a label.
func (c *Cluster) label(ctx context.Context, pod *corev1.Pod, name, value string) error {
	_, err := c.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, labelPatch(name, value), metav1.PatchOptions{})
	return err
}

// LabelNode gives a node a label.
func (c *Cluster) LabelNode(ctx context.Context, node *Node, name, value string) error {
	_, err := c.Client.CoreV1().Nodes().Patch(ctx, node.Name(), types.MergePatchType, labelPatch(name, value), metav1.PatchOptions{})
	return err
}

func labelPatch(name, value string) []byte {
	return fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, name, value)
}
