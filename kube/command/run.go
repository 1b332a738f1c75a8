package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/node"
	pod "github.com/shunt-lb/shunt/internal/pod/daemon"
	"github.com/shunt-lb/shunt/internal/start"
	"github.com/shunt-lb/shunt/kube/daemonset"
	"github.com/shunt-lb/shunt/kube/event"
	"github.com/shunt-lb/shunt/kube/give"
	"github.com/shunt-lb/shunt/kube/place"
	"github.com/shunt-lb/shunt/kube/probe"
	"github.com/shunt-lb/shunt/kube/source"
)

const runHelp = `Follow the apiserver, and balance the Services of the cluster at the interfaces that the file names,
beside the file's own services. It is the daemon of ` + "`shunt run`" + ` with another source: its socket, its
metrics and all commands of shunt are the same. With ` + "`accelerate`" + ` in the file, packets between this node's pods,
and to those of other nodes, go past the node's stack, too.

The command changes nothing before it has read everything from the apiserver once. Until then the data
plane of an earlier instance goes on, and later it goes on while the apiserver does not answer.

--on-exit says what SIGTERM does, as for ` + "`shunt run`" + `; here the default is keep, so that the next start of
a node's agent loses nothing. Ctrl-C (SIGINT) always detaches. So does SIGTERM once the DaemonSet that
--daemonset names is gone: no agent will start after it.

With --direct-return, a node sends packets of clients outside unchanged, in tunnels, to a node with a pod of the
Service, and that node answers the client itself. So pods see the clients' addresses with externalTrafficPolicy
Cluster, too. The agents tell each other in the ConfigMap of --direct-return-tunnels which tunnels their nodes open.
A port whose pods are not all on such nodes has NAT, as without the option: ` + "`shunt-kube explain`" + ` says why. An
agent without --direct-return, but with the ConfigMap, removes its node's entry.`

func newRun(errOut io.Writer) *cobra.Command {
	var flags start.Flags
	var from cluster
	agent := agent{probes: newProbes()}
	c := &cobra.Command{
		Use:   "run",
		Short: "Balance the cluster's Services on this node (needs root)",
		Long:  runHelp,
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errors.New("`shunt-kube run` loads programs into the kernel, which needs root: run it with sudo")
			}
			if err := flags.Check(c, errOut); err != nil {
				return usageError{err}
			}
			if err := from.check(); err != nil {
				return err
			}
			client, err := from.connect(flags.Log)
			if err != nil {
				return err
			}
			if agent.grace < 0 {
				return usageError{fmt.Errorf("--endpoint-grace %s is in the past; 0 is for ever", agent.grace)}
			}
			giving, wake, err := agent.giver(&from, client, flags.Log)
			if err != nil {
				return err
			}
			networks, err := agent.placer(&from, client, flags.Log)
			if err != nil {
				return err
			}
			tunnels, err := newOpener(&from, client, flags.Log)
			if err != nil {
				return err
			}
			events := event.New(client, from.node, event.DefaultPace, flags.Log)
			var s *source.Source
			probes := probe.New(func() bool { return s.InStep() })
			defer probes.Close()
			options := from.options(client, flags.Log)
			options.Grace, options.Placed, options.Balance = agent.grace, networks.Seen, from.balance(wake)
			options.Direct.Seen, options.Direct.Opens = tunnels.Seen, tunnels.Opens
			options.Look, options.Answer, options.Tell = looker(from.node, flags.Log), probes.Answer, events.Show
			s, err = source.New(options)
			if err != nil {
				return err
			}
			ctx := flags.Obey(c.Context(), func() { os.Exit(exitInterrupted) })
			ctx, end, err := agent.begin(ctx, &flags, client, s.InStep)
			if err != nil {
				return err
			}
			defer end()
			if err := awaitInterfaces(ctx, flags.Log, agent.interfaces); err != nil {
				return err
			}
			flags.Log.Info("waiting for the apiserver", "node", from.node)
			if err := s.Open(ctx); err != nil {
				return err
			}
			holder := holder{on: from.moving, log: flags.Log}
			encapsulates := func(e model.Encapsulation) { tunnels.encapsulated(e); s.Encapsulates(e) }
			flags.Products = products(daemon.Options{Taken: holder.taken(), Networks: networks.In, Encapsulation: encapsulates,
				Sources: []daemon.Source{{Name: source.Name, First: s.First, FirstDecapsulation: s.Decapsulation, Run: holder.beside(s.Follow)}}})
			flags.Detaching, flags.Detached = tunnels.withdraw, holder.release
			flags.Version = start.BuildVersion()
			flags.Collectors = append(s.Collectors(), agent.probes)
			flags.Status = func(st *shuntv1.GetStatusResponse) { st.Cluster = s.Status() }
			telling, stopTelling := context.WithCancel(ctx)
			var told sync.WaitGroup
			told.Go(func() { events.Run(telling) })
			told.Go(func() { giving(telling) })
			told.Go(func() { networks.Run(telling) })
			tunnels.begin(telling)
			defer tunnels.wait()
			defer told.Wait()
			defer stopTelling()
			holder.take()
			return holder.over(flags.Run(ctx, errOut))
		},
	}
	from.flags(c)
	agent.flags(c)
	flags.Add(c, node.ExitKeep)
	return c
}

// products returns the products that a node's file can name: the balancer, with the cluster's Services, and the pod shortcuts. With a source in o, each
// file has to name the balancer's interfaces: without them no Service would be served.
func products(o daemon.Options) []node.Product {
	return []node.Product{daemon.Product(o), pod.Product()}
}

// agent has the options that shunt-kube only has as a pod of a DaemonSet.
type agent struct {
	interfaces []string
	health     string
	daemonset  string
	grace      time.Duration
	lease      string
	probes     *prometheus.CounterVec
}

func (a *agent) flags(c *cobra.Command) {
	c.Flags().StringSliceVar(&a.interfaces, "await-interface", nil, "wait until this interface exists; for an interface in the file that CNI makes with the node's first pod")
	c.Flags().StringVar(&a.health, "health-address", "", "ADDRESS:PORT of GET /healthz, which is 200 while the node is in step with the cluster; default: not served")
	c.Flags().DurationVar(&a.grace, "endpoint-grace", time.Minute, "time after which a Service without an endpoint that takes connections gets an Event; 0: never")
	c.Flags().StringVar(&a.lease, "load-balancer-lease", "kube-system/shunt-kube", "NAMESPACE/NAME of the Lease of the one agent that gives Services the addresses of --load-balancer-pool")
	c.Flags().StringVar(&a.daemonset, "daemonset", "", "NAMESPACE/NAME of this pod's DaemonSet: once it is gone, SIGTERM detaches")
}

// giver returns the function that gives Services addresses of the pool while this agent holds the Lease; without a pool
// it does nothing.
func (a *agent) giver(from *cluster, client kubernetes.Interface, log *slog.Logger) (run func(context.Context), wake func(), err error) {
	if from.addresses.Empty() {
		return func(context.Context) {}, func() {}, nil
	}
	g, err := give.New(give.Options{Client: client, Lease: a.lease, Node: from.node, Pool: from.addresses, Ours: from.ours(), Log: log})
	if err != nil {
		return nil, nil, usageError{err}
	}
	return g.Run, g.Wake, nil
}

// placer returns the Writer that tells the other agents this node's networks; nil: they do not ask.
func (a *agent) placer(from *cluster, client kubernetes.Interface, log *slog.Logger) (*place.Writer, error) {
	if from.located() == "" {
		return nil, nil
	}
	w, err := place.New(place.Options{Client: client, Object: from.located(), Node: from.node, Pool: from.addresses, Log: log})
	if err != nil {
		return nil, usageError{err}
	}
	return w, nil
}

// begin starts the tasks that the flags ask for, until end is called. told is the context that stops the node.
func (a *agent) begin(told context.Context, flags *start.Flags, client kubernetes.Interface, inStep func() bool) (stop context.Context, end func(), err error) {
	end = func() {}
	if a.health != "" {
		server, address, err := serveHealth(a.health, inStep, a.probes)
		if err != nil {
			return nil, nil, err
		}
		flags.Log.Info("serving /healthz", "address", address)
		end = func() { _ = server.Close() } // a probe that is under way fails, as the next one will
	}
	if a.daemonset == "" {
		return told, end, nil
	}
	watch, err := daemonset.Follow(client, a.daemonset)
	if err != nil {
		end()
		return nil, nil, usageError{err}
	}
	interrupted, interrupt := context.WithCancel(flags.Interrupted)
	flags.Interrupted = interrupted
	stop, stopping := context.WithCancel(context.WithoutCancel(told))
	go func() {
		<-told.Done()
		if flags.OnExit == node.ExitKeep && interrupted.Err() == nil && watch.Gone(goneTimeout, flags.Log) {
			flags.Log.Info("the DaemonSet is gone, and no agent follows", "daemonset", a.daemonset)
			interrupt()
		}
		stopping()
	}()
	closeHealth := end
	return stop, func() { closeHealth(); interrupt(); watch.Close() }, nil
}

// goneTimeout limits the wait for an apiserver that has not listed the DaemonSets yet.
const goneTimeout = 5 * time.Second

// newProbes makes kube-proxy's metric of the answers of /healthz.
func newProbes() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kubeproxy_proxy_healthz_total", Help: "Answers at /healthz, by HTTP status."}, []string{"code"})
}

// serveHealth answers /healthz, with kube-proxy's path and meaning: whether traffic for the cluster's Services
// should be sent to this node.
func serveHealth(address string, well func() bool, probes *prometheus.CounterVec) (server *http.Server, at string, err error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, "", fmt.Errorf("serve /healthz at %s: %w: does a kube-proxy on this node use port 10256? End it, or give --health-address another port", address, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if !well() {
			probes.WithLabelValues("503").Inc()
			http.Error(w, "not in step with the cluster yet", http.StatusServiceUnavailable)
			return
		}
		probes.WithLabelValues("200").Inc()
		fmt.Fprintln(w, "in step with the cluster")
	})
	server = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = server.Serve(listener) }() // ends with Close
	return server, listener.Addr().String(), nil
}

// awaitInterfaces returns once all interfaces exist, or ctx ends.
func awaitInterfaces(ctx context.Context, log *slog.Logger, names []string) error {
	const interval = 200 * time.Millisecond
	for _, name := range names {
		for told := false; ; told = true {
			_, err := net.InterfaceByName(name)
			if err == nil {
				break
			}
			if !told {
				log.Info("waiting for an interface", "interface", name, "reason", err)
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("wait for the interface %s: %w: nothing was changed", name, ctx.Err())
			case <-time.After(interval):
			}
		}
	}
	return nil
}
