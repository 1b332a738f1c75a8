package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/start"
	"github.com/shunt-lb/shunt/kube/source"
	"github.com/shunt-lb/shunt/kube/translate"
)

// ask opens the source once, for a command that prints and ends.
func (c *cluster) ask(command *cobra.Command, errOut io.Writer, timeout time.Duration) (*source.Source, error) {
	log, err := start.Log(errOut, "text", false)
	if err != nil {
		return nil, err
	}
	s, err := c.open(log)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(command.Context(), timeout)
	context.AfterFunc(command.Context(), cancel) // not when this function returns: the end of a follower would be reported
	return s, s.Ask(ctx)
}

const askTimeout = 30 * time.Second

func newExplain(out, errOut io.Writer) *cobra.Command {
	var from cluster
	var timeout time.Duration
	c := &cobra.Command{
		Use:   "explain NAMESPACE/NAME[:PORT]",
		Short: "Show how a node serves a Service, endpoint by endpoint, and why; no root, no daemon",
		Long: `Print each port of a Service: the addresses that it is served at on this node, and each of its endpoints with
whether it takes new connections, and why. PORT is a port's name or number.`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			key, port, _ := strings.Cut(args[0], ":")
			if namespace, name, ok := strings.Cut(key, "/"); !ok || namespace == "" || name == "" {
				return usageError{fmt.Errorf("%q is no NAMESPACE/NAME[:PORT]", args[0])}
			}
			s, err := from.ask(c, errOut, timeout)
			if err != nil {
				return err
			}
			e, err := s.Explain(key)
			if err != nil {
				return err
			}
			return printExplanation(out, key, port, e)
		},
	}
	from.flags(c)
	c.Flags().DurationVar(&timeout, "timeout", askTimeout, "time limit for the apiserver's answers")
	return c
}

// printExplanation prints one port, or all if wanted is empty.
func printExplanation(out io.Writer, key, wanted string, e translate.Explanation) error {
	if e.Unserved != "" {
		_, err := fmt.Fprintf(out, "%s is left alone: %s.\n", key, e.Unserved)
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	var names []string
	for _, p := range e.Ports {
		number := strconv.Itoa(int(p.Port))
		if wanted != "" && wanted != p.Name && wanted != number {
			names = append(names, strings.TrimPrefix(p.Name+" ", " ")+number)
			continue
		}
		names = nil
		title := strings.TrimSpace(fmt.Sprintf("port %d %s %s", p.Port, p.Protocol, p.Name))
		if len(p.Variants) == 0 {
			fmt.Fprintf(w, "%s: not served\n", title)
		}
		for _, v := range p.Variants {
			fmt.Fprintf(w, "%s\n", title)
			printVariant(w, v)
		}
		if p.NAT != "" {
			fmt.Fprintf(w, "  Clients outside have nat, not direct return: %s.\n", p.NAT)
		}
		if wanted != "" {
			break
		}
	}
	if len(names) > 0 {
		return fmt.Errorf("%s has no port %q; it has %s", key, wanted, strings.Join(names, ", "))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if e.Health.Port != 0 {
		answer := "503: the node has no endpoint that is ready"
		if e.Health.Local > 0 {
			answer = "200: endpoints on the node that are ready: " + strconv.Itoa(e.Health.Local)
		}
		fmt.Fprintf(out, "healthCheckNodePort %d answers %s\n", e.Health.Port, answer)
	}
	for _, a := range e.Announced {
		fmt.Fprintf(out, "%s: %s\n", a.Address, announcementText(&shuntv1.ClusterAddress{Node: a.Node, Here: a.Here}, nil, nil))
	}
	for _, f := range e.Faults {
		fmt.Fprintln(out, f)
	}
	return nil
}

func printVariant(w io.Writer, v translate.VariantExplanation) {
	var frontends []string
	for _, f := range v.Frontends {
		frontends = append(frontends, f.String())
	}
	fmt.Fprintf(w, "  at %s\n  by %s, as service %s\n", strings.Join(frontends, ", "), v.Forwarding, v.Name)
	if len(v.AllowFrom) > 0 {
		fmt.Fprintf(w, "  for clients in %v\n", v.AllowFrom)
	}
	if v.Policy.PassesBegun {
		fmt.Fprintf(w, "  TCP connections from before are left to the host (--moving)\n")
	}
	switch {
	case v.Policy.Tunnelled:
		fmt.Fprintf(w, "  to nodes %s\n", strings.Join(nodesOf(v.Backends), ", "))
	case slices.ContainsFunc(v.Frontends, func(f model.Frontend) bool { return f.Protocol&model.Tunnelled != 0 }):
		fmt.Fprintf(w, "  for packets that nodes, this one too, send to this node's endpoints\n")
	}
	taking := 0
	for _, e := range v.Endpoints {
		takes := "-"
		if e.Takes {
			takes, taking = "takes", taking+1
		}
		fmt.Fprintf(w, "    %s\t%s\t%s\t%s\n", e.BackendAddress, e.Pod, takes, e.Why)
	}
	switch {
	case taking == 0 && v.Policy.Rejects:
		fmt.Fprintf(w, "  No endpoint takes new connections: TCP is refused, and UDP gets \"port unreachable\".\n")
	case taking == 0:
		fmt.Fprintf(w, "  No endpoint of this node takes new connections, and packets are dropped: other nodes have some.\n")
	}
}

// nodesOf returns backends that are nodes as text.
func nodesOf(nodes []model.Backend) []string {
	texts := []string{}
	for _, n := range nodes {
		text := fmt.Sprintf("%s (%s, weight %d)", n.Name, n.Address, n.Weight)
		if n.Weight == 0 {
			text = fmt.Sprintf("%s (%s, no new flows)", n.Name, n.Address)
		}
		texts = append(texts, text)
	}
	if len(texts) == 0 {
		return []string{"none"}
	}
	return texts
}

func newCheck(out, errOut io.Writer) *cobra.Command {
	var from cluster
	var timeout time.Duration
	c := &cobra.Command{
		Use:   "check",
		Short: "Find faults that keep Services from working on this node; exits with 1 if there are any",
		Long: `Ask the apiserver what shunt-kube needs, and look for a kube-proxy on this node. To see its rules, it
needs root, and to see its process, the node's PID namespace.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			from.look = true
			s, err := from.ask(c, errOut, timeout)
			if err != nil {
				return err
			}
			s.Current()
			cluster := s.Status()
			printCluster(out, cluster)
			for _, f := range cluster.Faults {
				fact(out, "fault", "%s", faultText(f))
			}
			if len(cluster.Faults) > 0 {
				return errors.New("the faults above keep Services from working on this node")
			}
			_, err = fmt.Fprintln(out, "no faults")
			return err
		},
	}
	from.flags(c)
	c.Flags().DurationVar(&timeout, "timeout", askTimeout, "time limit for the apiserver's answers")
	return c
}
