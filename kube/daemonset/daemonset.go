// Package daemonset finds out for an agent whether its DaemonSet still exists. An agent that has to stop keeps its data
// plane, because another one follows; once the DaemonSet is gone, none does.
package daemonset

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// Watch follows one DaemonSet.
type Watch struct {
	key       string
	client    kubernetes.Interface
	informer  cache.SharedIndexInformer
	factory   informers.SharedInformerFactory
	stop      context.CancelFunc
	following context.Context //nolint:containedctx // of the informer's life
}

// Follow follows the DaemonSet called NAMESPACE/NAME until Close. It needs the rights to list and watch it.
func Follow(client kubernetes.Interface, key string) (*Watch, error) {
	namespace, name, err := cache.SplitMetaNamespaceKey(key)
	if err != nil || namespace == "" || name == "" {
		return nil, fmt.Errorf("--daemonset is NAMESPACE/NAME, not %q", key)
	}
	w := &Watch{key: key, client: client}
	w.factory = informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(l *metav1.ListOptions) {
			l.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
		}))
	w.informer = w.factory.Apps().V1().DaemonSets().Informer()
	w.following, w.stop = context.WithCancel(context.Background())
	w.factory.Start(w.following.Done())
	return w, nil
}

// Gone reports whether the apiserver says that the DaemonSet does not exist, or that it is being deleted. If it says nothing within
// the time, the DaemonSet counts as existing.
//
// It asks again, because on a busy machine the kubelet may learn of the pod's end before the watch learns of the DaemonSet's. An
// uninstallation also removes the right to ask; then Gone waits for the watch, which began with that right.
func (w *Watch) Gone(within time.Duration, log *slog.Logger) bool {
	ctx, cancel := context.WithTimeout(w.following, within)
	defer cancel()
	namespace, name, _ := strings.Cut(w.key, "/")
	object, err := w.client.AppsV1().DaemonSets(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case err == nil:
		return object.DeletionTimestamp != nil
	case apierrors.IsNotFound(err):
		return true
	}
	forbidden := apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
	said, gone := false, false
	tick := time.NewTicker(tickInterval)
	defer tick.Stop()
	for ctx.Err() == nil {
		said, gone = w.heard()
		if gone || said && !forbidden {
			return gone
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	if !said || forbidden {
		log.Warn("cannot find out whether the DaemonSet still exists, so the data plane is kept; to remove it, run `shunt uninstall` on the node", "daemonset", w.key, "error", err)
	}
	return false
}

// tickInterval is the interval at which Gone looks at the watch.
const tickInterval = 20 * time.Millisecond

// heard returns the last news of the watch.
func (w *Watch) heard() (said, gone bool) {
	if !w.informer.HasSynced() {
		return false, false
	}
	object, there, err := w.informer.GetStore().GetByKey(w.key)
	if err != nil || !there {
		return err == nil, err == nil
	}
	return true, object.(metav1.Object).GetDeletionTimestamp() != nil
}

// Close ends the watch.
func (w *Watch) Close() {
	w.stop()
	w.factory.Shutdown()
}
