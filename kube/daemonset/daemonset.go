// Package daemonset tells an agent whether the DaemonSet that it is of is still there. An agent that is told
// to stop keeps its data plane, because another one follows; once the DaemonSet is gone, none does.
package daemonset

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// Watch follows one DaemonSet.
type Watch struct {
	key       string
	informer  cache.SharedIndexInformer
	factory   informers.SharedInformerFactory
	stop      context.CancelFunc
	following context.Context //nolint:containedctx // of the informer's life
}

// Follow follows the DaemonSet called NAMESPACE/NAME until Close. It needs the rights to list and watch it.
func Follow(client kubernetes.Interface, key string) (*Watch, error) {
	namespace, name, ok := strings.Cut(key, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return nil, fmt.Errorf("--daemonset is NAMESPACE/NAME, not %q", key)
	}
	w := &Watch{key: key}
	w.factory = informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(l *metav1.ListOptions) {
			l.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
		}))
	w.informer = w.factory.Apps().V1().DaemonSets().Informer()
	w.following, w.stop = context.WithCancel(context.Background())
	w.factory.Start(w.following.Done())
	return w, nil
}

// Gone reports whether the apiserver has said that there is no such DaemonSet, or that it is being deleted. If it has said nothing within
// the time, the DaemonSet counts as there.
func (w *Watch) Gone(within time.Duration, log *slog.Logger) bool {
	ctx, cancel := context.WithTimeout(w.following, within)
	defer cancel()
	if !cache.WaitForCacheSync(ctx.Done(), w.informer.HasSynced) {
		log.Warn("nobody has said whether the DaemonSet is still there, so the data plane is kept; to remove it, run `shunt uninstall` on the node", "daemonset", w.key)
		return false
	}
	object, there, err := w.informer.GetStore().GetByKey(w.key)
	if err != nil || !there {
		return err == nil
	}
	return object.(metav1.Object).GetDeletionTimestamp() != nil
}

// Close ends following.
func (w *Watch) Close() {
	w.stop()
	w.factory.Shutdown()
}
