package command

import (
	"context"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/shunt-lb/shunt/kube/rival"
	"github.com/shunt-lb/shunt/kube/translate"
)

// looker finds what is in the way on this machine. What it could not look at it says.
func looker(node string, log *slog.Logger) func() []translate.Fault {
	return func() []translate.Fault {
		found, err := rival.Look()
		if err != nil {
			log.Warn("did not look for all of kube-proxy; it needs root", "error", err)
		}
		if fault, is := found.Fault(node); is {
			return []translate.Fault{fault}
		}
		return nil
	}
}

// eventTimeout is for one Event, which the node's start waits for.
const eventTimeout = 2 * time.Second

// teller makes a fault an Event on the Node object, with the name for its UID as kubelet has it: `kubectl describe node`
// shows those.
func teller(client kubernetes.Interface, node string, log *slog.Logger) func(translate.Fault) {
	return func(f translate.Fault) {
		ctx, cancel := context.WithTimeout(context.Background(), eventTimeout)
		defer cancel()
		now := metav1.Now()
		event := &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{GenerateName: node + ".", Namespace: metav1.NamespaceDefault},
			InvolvedObject: corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: node, UID: types.UID(node)},
			Type:           corev1.EventTypeWarning, Reason: reasons[f.Code], Message: f.Text + ": " + f.Remedy,
			Source: corev1.EventSource{Component: "shunt-kube", Host: node}, FirstTimestamp: now, LastTimestamp: now, Count: 1,
		}
		if _, err := client.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, event, metav1.CreateOptions{}); err != nil {
			log.Warn("could not make an Event of a fault", "object", f.Object, "fault", f.Code, "error", err)
		}
	}
}

// reasons are the faults that become Events, in Kubernetes' style.
var reasons = map[translate.Code]string{translate.KubeProxyFound: "KubeProxyFound"}
