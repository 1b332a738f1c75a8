// Package place gives the agents of other nodes facts about this node, by entries in a ConfigMap: the networks of its interfaces, and the
// tunnels that it opens. ARP and neighbour discovery reach only hosts in these networks, so a node in an address's network announces the
// address, if there is such a node.
//
//	daemon ──► In ────┐
//	source ──► Seen ──┴─► Run ──► an entry of the ConfigMap ──► source, on every node ──► translate.Translator.Networks
//
// An agent makes an entry only if its node's networks do not contain the whole pool. Where all nodes are in the pool's networks, no agent writes anything. A node
// without an entry counts as a node in all networks, and so does the node of an agent whose version makes no entries.
//
//	agent, once its node's kernel takes packets out of tunnels ──► Opens ──► an entry of a ConfigMap ──► source, on every node ──► translate.Translator.Peers
//
// The two kinds of entries have different keys, so they can be in one ConfigMap or in two. An agent of a version that does not know one kind leaves it alone.
package place

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/shunt-lb/shunt/kube/pool"
)

// A request may take writeTimeout, and writeRetry passes after a failed one.
const (
	writeTimeout = 10 * time.Second
	writeRetry   = 10 * time.Second
)

// Options configure a Writer.
type Options struct {
	Client kubernetes.Interface
	// Object is the NAMESPACE/NAME of the ConfigMap, which exists.
	Object string
	// Node is the key of this node's entry.
	Node string
	Pool pool.Pool
	Log  *slog.Logger
}

// Writer keeps this node's entry. Run needs the right to patch the ConfigMap. A nil Writer does nothing.
type Writer struct {
	options         Options
	namespace, name string
	key             string
	words           words
	retry           time.Duration
	wake            chan struct{}

	mu     sync.Mutex
	wanted entry
	has    entry
}

// words are a Writer's messages.
type words struct {
	told, fact string // of an entry that was written, with the name of its text
	none       string // the text of no entry
	failed     string
}

// entry is an entry of the ConfigMap.
type entry struct {
	known bool
	value *string // nil: there is no entry
}

func (e entry) is(o entry) bool {
	return e.known && o.known && (e.value == nil) == (o.value == nil) && (e.value == nil || *e.value == *o.value)
}

// New returns a Writer of the node's networks, which writes nothing yet.
func New(o Options) (*Writer, error) {
	return newWriter(o, o.Node, "--load-balancer-networks", words{
		told: "told the agents in which networks this node is", fact: "networks", none: "all of the pool's",
		failed: "cannot tell the agents of other nodes in which networks this node is, so they may have it announce addresses of other networks; trying again",
	})
}

func newWriter(o Options, key, object string, said words) (*Writer, error) {
	namespace, name, err := cache.SplitMetaNamespaceKey(o.Object)
	if err != nil || namespace == "" || name == "" {
		return nil, fmt.Errorf("%s is NAMESPACE/NAME, not %q", object, o.Object)
	}
	return &Writer{options: o, namespace: namespace, name: name, key: key, words: said, retry: writeRetry, wake: make(chan struct{}, 1)}, nil
}

// In takes the networks of the node's interfaces. Any goroutine may call it, and it does not wait.
func (w *Writer) In(networks []netip.Prefix) {
	if w == nil {
		return
	}
	wanted := entry{known: true}
	if !w.options.Pool.Within(networks) {
		text := format(networks)
		wanted.value = &text
	}
	w.note(&w.wanted, wanted)
}

// Seen takes the entry that the ConfigMap has; nil: it has none. Any goroutine may call it, and it does not wait.
func (w *Writer) Seen(value *string) {
	if w != nil {
		w.note(&w.has, entry{true, value})
	}
}

func (w *Writer) note(at *entry, e entry) {
	w.mu.Lock()
	defer w.mu.Unlock()
	*at = e
	select {
	case w.wake <- struct{}{}:
	default: // it is awake already
	}
}

// due returns the entry that Run has to write; false: there is nothing to write.
func (w *Writer) due() (entry, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.wanted, w.wanted.known && w.has.known && !w.wanted.is(w.has)
}

// Run writes the entry whenever the ConfigMap has another one, until ctx ends. It is called once.
func (w *Writer) Run(ctx context.Context) {
	if w == nil {
		return
	}
	said := ""
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		case <-again:
		}
		again = nil
		due, is := w.due()
		if !is {
			continue
		}
		err := w.write(ctx, due)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			w.options.Log.Info(w.words.told, w.words.fact, w.text(due))
			said = ""
			w.mu.Lock()
			w.has = due
			w.mu.Unlock()
			continue
		}
		if text := err.Error(); text != said {
			said = text
			w.options.Log.Warn(w.words.failed, "configmap", w.options.Object, "error", err)
		}
		again = time.After(w.retry)
	}
}

// text formats an entry for the log.
func (w *Writer) text(e entry) string {
	if e.value == nil {
		return w.words.none
	}
	return *e.value
}

// write sets only this node's key, and leaves the object's other keys alone, so agents do not wait for each other.
func (w *Writer) write(ctx context.Context, e entry) error {
	return patch(ctx, w.options.Client, w.namespace, w.name, map[string]*string{w.key: e.value})
}

// patch sets and removes (nil) entries of a ConfigMap.
func patch(ctx context.Context, client kubernetes.Interface, namespace, name string, entries map[string]*string) error {
	text, err := json.Marshal(map[string]any{"data": entries})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	_, err = client.CoreV1().ConfigMaps(namespace).Patch(ctx, name, types.MergePatchType, text, metav1.PatchOptions{})
	return err
}

// format writes networks as an entry.
func format(networks []netip.Prefix) string {
	texts := make([]string, len(networks))
	for i, n := range networks {
		texts[i] = n.Masked().String()
	}
	slices.Sort(texts)
	return strings.Join(slices.Compact(texts), ",")
}

// Parse reads the ConfigMap's entries: the networks of nodes. It leaves out an entry that this version does not understand, as if
// the node's agent had made no entry.
func Parse(data map[string]string) map[string][]netip.Prefix {
	all := map[string][]netip.Prefix{}
	for node, text := range data {
		if strings.HasSuffix(node, tunnelKeyEnd) {
			continue
		}
		networks, ok := []netip.Prefix{}, true
		for part := range strings.SplitSeq(text, ",") {
			if text == "" {
				break // the node is in no network
			}
			prefix, err := netip.ParsePrefix(part)
			ok = ok && err == nil
			networks = append(networks, prefix)
		}
		if ok {
			all[node] = networks
		}
	}
	return all
}
