package command

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/place"
)

// withdrawTimeout limits the wait for the apiserver at the end of an agent that detaches. It is less than kubelet's time for a pod's end.
const withdrawTimeout = 5 * time.Second

// opener keeps the entry for tunnels with which this node tells the others that it opens tunnels: see place.Writer. The entry outlives
// an agent that keeps the data plane.
type opener struct {
	*place.Writer // nil: there is no ConfigMap for entries
	on            bool
	node, object  string
	log           *slog.Logger
	stop          context.CancelFunc
	running       sync.WaitGroup
}

// newOpener returns an opener, which writes nothing yet.
func newOpener(from *cluster, client kubernetes.Interface, log *slog.Logger) (*opener, error) {
	o := &opener{on: from.direct != "", node: from.node, object: from.tunnels, log: log, stop: func() {}}
	if o.object == "" {
		return o, nil
	}
	var err error
	if o.Writer, err = place.NewTunnels(place.Options{Client: client, Object: o.object, Node: o.node, Log: log}); err != nil {
		return nil, usageError{err}
	}
	return o, nil
}

// begin writes the entry whenever the node opens other tunnels, until withdraw is called or ctx ends; wait waits for that. An agent
// without --direct-return withdraws an earlier agent's entry, before the balancer begins to drop packets out of tunnels.
func (o *opener) begin(ctx context.Context) {
	if !o.on {
		o.withdraw()
		return
	}
	ctx, o.stop = context.WithCancel(ctx)
	o.running.Go(func() { o.Run(ctx) })
}

func (o *opener) wait() { o.running.Wait() }

// withdraw removes the entry. It is called before the programs go: a packet that another node sends meanwhile still reaches its pod, and
// afterwards no node sends any. In the other order all packets of that time would be lost.
func (o *opener) withdraw() {
	o.stop()
	o.running.Wait() // a write that is under way would bring the entry back
	ctx, cancel := context.WithTimeout(context.Background(), withdrawTimeout)
	defer cancel()
	if err := o.Withdraw(ctx); err != nil {
		o.log.Warn("cannot tell the agents of other nodes that this node opens no more tunnels, so connections to its pods may be lost until they find this node's agent away; remove the key by hand",
			"configmap", o.object, "key", place.TunnelKey(o.node), "error", err)
	}
}

// encapsulated warns of a file whose outer source addresses are not the addresses by which the other nodes know this one.
func (o *opener) encapsulated(e model.Encapsulation) {
	if o.on && (e.Sources4.IsValid() || e.Sources6.IsValid()) {
		o.log.Warn("the file's encapsulation has source addresses: with --direct-return, other nodes drop packets that are not from the address of this node's agent; remove these addresses from the file",
			"sources", []any{e.Sources4, e.Sources6})
	}
}
