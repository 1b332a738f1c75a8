// Package command is the command line of shunt-kube. It has the commands for Kubernetes;
// `shunt status` and all other commands of shunt work with this daemon, too.
package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/place"
	"github.com/shunt-lb/shunt/kube/pool"
	"github.com/shunt-lb/shunt/kube/source"
	"github.com/shunt-lb/shunt/kube/translate"
)

// The exit codes are shunt's: docs/guide/commands.md.
const (
	exitOK          = 0
	exitRefused     = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// usageError is an error in the command line.
type usageError struct{ error }

// Main runs the command line and returns the exit code.
func Main(args []string, out, errOut io.Writer) int {
	root := &cobra.Command{
		Use: "shunt-kube", Short: "Balance the Services of a Kubernetes cluster on one of its nodes",
		SilenceErrors: true, SilenceUsage: true,
	}
	root.AddCommand(newRun(errOut), newStatus(out), newServices(out, errOut), newExplain(out, errOut), newCheck(out, errOut))
	root.SetArgs(args)
	root.SetOut(out)
	root.SetErr(errOut)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	err := root.ExecuteContext(context.Background())
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usage):
		fmt.Fprintf(errOut, "shunt-kube: %v\nRun `shunt-kube --help`, or `shunt-kube COMMAND --help`.\n", err)
		return exitUsage
	}
	fmt.Fprintf(errOut, "shunt-kube: %v\n", err)
	return exitRefused
}

// cluster has the apiserver's address, and this node's name there.
type cluster struct {
	kubeconfig, node, proxyName string
	inside                      bool    // external IPs are for clients in the cluster, too
	moving                      bool    // connections that began before are left to the host
	variables                   []error // of the environment, which cannot be read
	ranges                      []string
	announce                    string
	agents                      string
	elect                       bool // one agent announces each address
	networks                    string
	direct                      string // a word of --direct-return
	tunnels                     string
	addresses                   pool.Pool // of ranges
	look                        bool      // look for faults on this machine, too
	contact                     *source.Contact
}

func (c *cluster) flags(command *cobra.Command) {
	command.Flags().StringVar(&c.kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"), "kubeconfig file for the apiserver (KUBECONFIG); default: the pod's service account")
	command.Flags().StringVar(&c.node, "node-name", os.Getenv("NODE_NAME"), "name of this machine's Node object (NODE_NAME); default: the host's name")
	command.Flags().StringVar(&c.proxyName, "service-proxy-name", "", "serve the Services with this value of the label service.kubernetes.io/service-proxy-name, instead of Services without the label")
	c.boolean(command, &c.inside, "external-ips-inside", "EXTERNAL_IPS_INSIDE", true, "serve externalIPs to clients in the cluster, too; with false, users who may make Services cannot redirect pods' connections to any address (EXTERNAL_IPS_INSIDE=false)")
	c.boolean(command, &c.moving, "moving", "MOVING", false, "leave earlier TCP connections to the host, whose connection tracking knows them, until kube-proxy's connections have ended (MOVING=true)")
	var ranges []string
	if text := os.Getenv("LOAD_BALANCER_POOL"); text != "" {
		ranges = strings.Split(text, ",")
	}
	command.Flags().StringSliceVar(&c.ranges, "load-balancer-pool", ranges, "addresses for Services of type LoadBalancer: FIRST-LAST, PREFIX or ADDRESS, separated by commas (LOAD_BALANCER_POOL); default: this agent gives none")
	command.Flags().StringVar(&c.announce, "load-balancer-announce", cmp.Or(os.Getenv("LOAD_BALANCER_ANNOUNCE"), announceL2), "how the network learns where these addresses are: l2, by ARP and neighbour discovery, or none (LOAD_BALANCER_ANNOUNCE)")
	command.Flags().StringVar(&c.agents, "agents", os.Getenv("AGENTS"), "NAMESPACE/NAME of the Service whose endpoints are the agents of all nodes (AGENTS); default: they are not known")
	c.boolean(command, &c.elect, "load-balancer-elect", "LOAD_BALANCER_ELECT", true, "with --agents, one ready agent announces each address of a load balancer; with false, or without --agents, each agent asks for all addresses, and one gets each (LOAD_BALANCER_ELECT=false)")
	command.Flags().StringVar(&c.networks, "load-balancer-networks", os.Getenv("LOAD_BALANCER_NETWORKS"), "NAMESPACE/NAME of the ConfigMap in which agents say in which networks their nodes are, for --load-balancer-elect: a node in an address's network announces it (LOAD_BALANCER_NETWORKS); default: any node does")
	command.Flags().StringVar(&c.direct, "direct-return", os.Getenv("DIRECT_RETURN"), "tunnels, gue or ipip, in which nodes send packets of clients outside to a node with a pod, which answers the client itself, so pods see the clients' addresses; needs --agents and --direct-return-tunnels (DIRECT_RETURN); default: none, and pods see a node's address")
	command.Flags().StringVar(&c.tunnels, "direct-return-tunnels", os.Getenv("DIRECT_RETURN_TUNNELS"), "NAMESPACE/NAME of the ConfigMap in which agents say which tunnels their nodes open, for --direct-return (DIRECT_RETURN_TUNNELS)")
}

// boolean adds a flag whose default is a variable of the environment; otherwise is the default without it.
func (c *cluster) boolean(command *cobra.Command, into *bool, flag, variable string, otherwise bool, usage string) {
	value := otherwise
	if text := os.Getenv(variable); text != "" {
		var err error
		if value, err = strconv.ParseBool(text); err != nil {
			c.variables = append(c.variables, usageError{fmt.Errorf("%s in the environment is true or false, not %q", variable, text)})
		}
	}
	command.Flags().BoolVar(into, flag, value, usage)
}

// The words of --load-balancer-announce are the same as for `announce` in the file.
const (
	announceL2   = string(model.AnnounceL2)
	announceNone = string(model.AnnounceNone)
)

// check reads the flags with a syntax of their own.
func (c *cluster) check() (err error) {
	if err := errors.Join(c.variables...); err != nil {
		return err
	}
	if c.announce != announceL2 && c.announce != announceNone {
		return usageError{fmt.Errorf("--load-balancer-announce is %s or %s, not %q", announceL2, announceNone, c.announce)}
	}
	if c.addresses, err = pool.Parse(c.ranges); err != nil {
		return usageError{fmt.Errorf("read --load-balancer-pool: %w", err)}
	}
	if _, known := directReturns[c.direct]; !known {
		return usageError{fmt.Errorf("--direct-return is gue or ipip, not %q", c.direct)}
	}
	for _, other := range []struct{ flag, value, kind string }{{"--agents", c.agents, "the Service of the agents"}, {"--direct-return-tunnels", c.tunnels, "a ConfigMap"}} {
		if c.direct != "" && other.value == "" {
			return usageError{fmt.Errorf("--direct-return %s needs %s NAMESPACE/NAME: %s", c.direct, other.flag, other.kind)}
		}
	}
	return nil
}

// directReturns are the words of --direct-return; without a word there is none.
var directReturns = map[string]model.Forwarding{"": model.ForwardingNAT, "gue": model.ForwardingDSRGUE, "ipip": model.ForwardingDSRIPIP}

// tunnel returns the kind of tunnels of direct return between nodes, with the default port. The zero value: there is none.
func (c *cluster) tunnel() place.Tunnel {
	switch f := directReturns[c.direct]; f {
	case model.ForwardingDSRGUE:
		return place.Tunnel{Forwarding: f, Port: model.DefaultGUEPort}
	case model.ForwardingDSRIPIP:
		return place.Tunnel{Forwarding: f}
	}
	return place.Tunnel{}
}

// announces reports whether this agent announces the addresses of load balancers: without a pool another system does.
func (c *cluster) announces() bool { return !c.addresses.Empty() && c.announce == announceL2 }

// elects reports whether the agents elect one node for an address; false: nothing is announced, or each agent asks.
func (c *cluster) elects() bool { return c.announces() && c.elect && c.agents != "" }

// followed returns the Service of the agents if this agent has to know them, or "".
func (c *cluster) followed() string {
	if !c.elects() && c.direct == "" {
		return ""
	}
	return c.agents
}

// located returns the ConfigMap of the nodes' networks; empty: no node is elected, or every node can be elected.
func (c *cluster) located() string {
	if !c.elects() {
		return ""
	}
	return c.networks
}

// ours returns a function that reports whether the pool is for a Service.
func (c *cluster) ours() func(*corev1.Service) bool {
	return (&translate.Translator{ProxyName: c.proxyName}).Balances
}

// balance returns a function that finds faults of load balancers' addresses, and wakes the giver if there is something to give; nil: there is no pool.
func (c *cluster) balance(wake func()) func([]*corev1.Service) []translate.Fault {
	if c.addresses.Empty() {
		return nil
	}
	return func(services []*corev1.Service) []translate.Fault {
		gifts, faults := c.addresses.Plan(services, c.ours())
		if len(gifts) > 0 {
			wake()
		}
		return faults
	}
}

// options returns a source's options that the flags say.
func (c *cluster) options(client kubernetes.Interface, log *slog.Logger) source.Options {
	return source.Options{Client: client, Node: c.node, ProxyName: c.proxyName, Announce: c.announces(), Agents: c.followed(), Elect: c.elects(), Networks: c.located(),
		Direct: source.Direct{Tunnel: c.tunnel(), Entries: c.tunnels}, Outside: !c.inside, Moving: c.moving, Contact: c.contact, Log: log}
}

// open prepares the source; it asks nothing yet.
func (c *cluster) open(log *slog.Logger) (*source.Source, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	client, err := c.connect(log)
	if err != nil {
		return nil, err
	}
	options := c.options(client, log)
	options.Balance = c.balance(func() {})
	if c.look {
		options.Look = looker(c.node, log)
	}
	return source.New(options)
}

// connect makes a client of the apiserver; it asks nothing yet. It sets this node's name.
func (c *cluster) connect(log *slog.Logger) (kubernetes.Interface, error) {
	var settings *rest.Config
	var err error
	if c.kubeconfig == "" {
		settings, err = rest.InClusterConfig()
	} else {
		settings, err = clientcmd.BuildConfigFromFlags("", c.kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("find the apiserver: %w: give --kubeconfig FILE, or run it in a pod with a service account", err)
	}
	if c.node == "" {
		if c.node, err = os.Hostname(); err != nil {
			return nil, fmt.Errorf("find this node's name: %w: give --node-name", err)
		}
		c.node = strings.ToLower(c.node) // as kubelet does
	}
	c.contact = source.Configure(settings, log)
	client, err := kubernetes.NewForConfig(settings)
	if err != nil {
		return nil, fmt.Errorf("use %s: %w", c.kubeconfig, err)
	}
	klog.SetSlogLogger(slog.New(quiet{log.Handler()}))
	return client, nil
}

// quiet passes a library's log on as messages for debugging: the source reports the important ones itself.
type quiet struct{ slog.Handler }

func (q quiet) Enabled(ctx context.Context, _ slog.Level) bool {
	return q.Handler.Enabled(ctx, slog.LevelDebug)
}

func newServices(out, errOut io.Writer) *cobra.Command {
	var from cluster
	var timeout time.Duration
	c := &cobra.Command{
		Use:   "services",
		Short: "Print how a node serves the cluster's Services, and which parts it does not serve; no root, no daemon",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			s, err := from.ask(c, errOut, timeout)
			if err != nil {
				return err
			}
			services, faults := s.Current()
			return printServices(out, services, faults)
		},
	}
	from.flags(c)
	c.Flags().DurationVar(&timeout, "timeout", askTimeout, "time limit for the apiserver's answers")
	return c
}

// printServices prints a line for each service, then a line for each fault.
func printServices(out io.Writer, services []model.Service, faults []translate.Fault) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SERVICE\tFRONTENDS\tFORWARDING\tBACKENDS")
	for _, s := range services {
		var frontends, backends []string
		for _, f := range s.Frontends {
			frontends = append(frontends, f.String())
		}
		for _, b := range s.Backends {
			text := b.BackendAddress.String()
			if b.Weight == 0 {
				text += " (no new flows)"
			}
			backends = append(backends, text)
		}
		if len(backends) == 0 {
			backends = []string{"none"}
		}
		if s.Policy.Tunnelled {
			backends = nodesOf(s.Backends)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", s.Name, strings.Join(frontends, ", "), s.Forwarding, strings.Join(backends, ", "))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, f := range faults {
		fmt.Fprintln(out, f)
	}
	return nil
}
