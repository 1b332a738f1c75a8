package place

import (
	"context"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Tunnel is the kind of tunnels that a node opens. The zero value is none.
type Tunnel struct {
	Forwarding model.Forwarding // model.ForwardingDSRIPIP or model.ForwardingDSRGUE
	Port       uint16           // UDP port of GUE, host byte order; 0 with IPIP
}

// tunnelKeyEnd ends the key of a node's entry for tunnels: no node's name has an underscore.
const tunnelKeyEnd = "_tunnel"

// TunnelKey returns the key of a node's entry for tunnels.
func TunnelKey(node string) string { return node + tunnelKeyEnd }

// The words of an entry for tunnels: "ipip", or "gue:6080".
const (
	wordIPIP = "ipip"
	wordGUE  = "gue"
)

// String returns the tunnel as an entry; "" for none.
func (t Tunnel) String() string {
	switch t.Forwarding {
	case model.ForwardingDSRIPIP:
		return wordIPIP
	case model.ForwardingDSRGUE:
		return wordGUE + ":" + strconv.Itoa(int(t.Port))
	}
	return ""
}

// parseTunnel reads an entry; it returns the zero value for tunnels that this version does not know.
func parseTunnel(text string) Tunnel {
	if text == wordIPIP {
		return Tunnel{Forwarding: model.ForwardingDSRIPIP}
	}
	word, number, _ := strings.Cut(text, ":")
	port, err := strconv.ParseUint(number, 10, 16)
	if word != wordGUE || err != nil || port == 0 {
		return Tunnel{}
	}
	return Tunnel{model.ForwardingDSRGUE, uint16(port)}
}

// NewTunnels returns a Writer of the tunnels that the node opens, which writes nothing yet.
func NewTunnels(o Options) (*Writer, error) {
	return newWriter(o, TunnelKey(o.Node), "the ConfigMap of the nodes' tunnels", words{
		told: "told the agents which tunnels this node opens", fact: "tunnels", none: "none",
		failed: "cannot tell the agents of other nodes which tunnels this node opens, so Services with endpoints here have NAT, or connections to this node are lost; trying again",
	})
}

// Opens takes the tunnels that the node opens; the zero value: it opens none. The caller says so once packets out of
// such tunnels reach the endpoints on the node. Any goroutine may call it, and it does not wait.
func (w *Writer) Opens(t Tunnel) {
	if w != nil {
		w.note(&w.wanted, tunnelEntry(t))
	}
}

func tunnelEntry(t Tunnel) entry {
	e := entry{known: true}
	if text := t.String(); text != "" {
		e.value = &text
	}
	return e
}

// Withdraw removes the entry, for an agent that detaches: other nodes then send it no more packets. It is called after
// Run has ended. Without the ConfigMap there is no entry.
func (w *Writer) Withdraw(ctx context.Context) error {
	if w == nil {
		return nil
	}
	if err := w.write(ctx, tunnelEntry(Tunnel{})); !apierrors.IsNotFound(err) {
		return err
	}
	return nil
}

// ForgetTunnels removes the entries of nodes from the ConfigMap called NAMESPACE/NAME.
func ForgetTunnels(ctx context.Context, client kubernetes.Interface, object string, nodes []string) error {
	namespace, name, err := cache.SplitMetaNamespaceKey(object)
	if err != nil {
		return err
	}
	entries := map[string]*string{}
	for _, node := range nodes {
		entries[TunnelKey(node)] = nil
	}
	return patch(ctx, client, namespace, name, entries)
}

// OwnTunnel returns a node's entry for tunnels; nil: there is none.
func OwnTunnel(data map[string]string, node string) *string {
	if text, has := data[TunnelKey(node)]; has {
		return &text
	}
	return nil
}

// ParseTunnels reads the entries of a ConfigMap for tunnels, by node. An entry that this version does not understand is
// the zero value: the node opens other tunnels.
func ParseTunnels(data map[string]string) map[string]Tunnel {
	all := map[string]Tunnel{}
	for key, text := range data {
		if node, is := strings.CutSuffix(key, tunnelKeyEnd); is {
			all[node] = parseTunnel(text)
		}
	}
	return all
}
