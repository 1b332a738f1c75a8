package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/start"
)

// answerTimeout limits the wait for answers that the agent gives from memory.
const answerTimeout = 5 * time.Second

// linesMax is the largest number of lines of a kind that are shown, unless --all is given.
const linesMax = 100

func newStatus(out io.Writer) *cobra.Command {
	var instance, socket, output string
	var all bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Show the state of the agent on this node; exits with 1 unless it is in step with the cluster",
		Long: `Ask the agent on this node, at its control socket, whether the node is in step with the cluster, and since when,
which Services are served, and why others are not, where programs are attached, and which addresses of load
balancers are announced. The command exits with 1 if no agent answers, if the node is not in step with the
cluster, or if the agent cannot know, because the apiserver does not answer.

` + "`shunt status`" + ` shows the data plane: services, endpoints and counters.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return usageError{fmt.Errorf("--output is text or json, not %q", output)}
			}
			if err := node.CheckInstance(instance); err != nil {
				return usageError{err}
			}
			meant := ""
			if c.Flags().Changed("instance") {
				meant = instance
			}
			st, err := askAgent(c.Context(), socket, meant)
			if err != nil {
				return err
			}
			if output == "json" {
				err = printStatusJSON(out, st)
			} else {
				err = printStatus(out, st, all)
			}
			return cmp.Or(err, unwell(st.Cluster))
		},
	}
	start.TargetFlags(c, &instance, &socket)
	c.Flags().StringVarP(&output, "output", "o", "text", "output format: text or json")
	c.Flags().BoolVar(&all, "all", false, fmt.Sprintf("show every fault and address; otherwise text shows at most %d of each", linesMax))
	return c
}

// askAgent asks the agent at a socket for its status.
func askAgent(ctx context.Context, socket, instance string) (st *shuntv1.GetStatusResponse, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	err = control.Read(socket, instance, func(c *control.Client) (err error) {
		st, err = c.Status(ctx)
		return err
	})
	switch {
	case errors.Is(err, control.ErrNoDaemon):
		return nil, fmt.Errorf("%w. An agent answers once it has read everything from the apiserver; until then its log says what it waits for. The data plane of an earlier agent goes on: `shunt status` shows it", err)
	case err == nil && st.Cluster == nil:
		err = fmt.Errorf("the daemon at %s (process %d) is not shunt-kube, and has no cluster: `shunt status` shows it", socket, st.GetDaemon().GetPid())
	}
	return st, err
}

// unwell returns the reason why the agent is not in step, or nil.
func unwell(c *shuntv1.Cluster) error {
	switch {
	case c.InStepSince == nil:
		return errors.New("the node is not in step with the cluster")
	case c.ApiserverError != "":
		return errors.New("the apiserver does not answer or refuses, so it is unknown whether the node is in step with the cluster")
	}
	return nil
}

// printStatusJSON prints the agent's parts of the API's answer.
func printStatusJSON(out io.Writer, st *shuntv1.GetStatusResponse) error {
	var parts []string
	for _, part := range []struct {
		name  string
		value proto.Message
	}{{"cluster", st.Cluster}, {"daemon", st.Daemon}} {
		text, err := control.JSON(part.value)
		if err != nil {
			return err
		}
		parts = append(parts, fmt.Sprintf("%q:%s", part.name, text))
	}
	_, err := fmt.Fprintf(out, "{%s}\n", strings.Join(parts, ","))
	return err
}

// printStatus prints a sentence, and then lines with a word and a fact.
func printStatus(out io.Writer, st *shuntv1.GetStatusResponse, all bool) error {
	c := st.Cluster
	switch {
	case c.InStepSince != nil && c.Changed != nil:
		fmt.Fprintf(out, "In step with the cluster since %s; the last change was put in force at %s.\n", clock(c.InStepSince), clock(c.Changed))
	case c.InStepSince != nil:
		fmt.Fprintf(out, "In step with the cluster since %s.\n", clock(c.InStepSince))
	case c.Refused != "":
		fmt.Fprintf(out, "Not in step with the cluster, and trying again: %s.\n", c.Refused)
	default:
		fmt.Fprintln(out, "Not in step with the cluster yet.")
	}
	d := st.Daemon
	fact(out, "agent", "process %d, running since %s, with %s", d.GetPid(), clock(d.GetSince()), d.GetConfigPath())
	printCluster(out, c)
	for _, p := range d.GetProducts() {
		fact(out, "product", "%s: %s", p.Name, cmp.Or(p.Does, "failed: "+p.Failed))
	}
	fact(out, "programs", "%s", programsText(st.Attached))
	shown := map[*shuntv1.Condition]bool{}
	var addresses, faults, conditions []string
	for _, a := range c.Announced {
		addresses = append(addresses, fmt.Sprintf("%s of %s: %s", a.Address, strings.Join(a.Services, ", "), announcementText(a, d.GetConditions(), shown)))
	}
	for _, f := range c.Faults {
		faults = append(faults, faultText(f))
	}
	for _, c := range d.GetConditions() {
		if !shown[c] {
			conditions = append(conditions, fmt.Sprintf("%s, %s (%s): %s: %s", c.Severity, c.Code, c.Subject, c.Text, c.Remedy))
		}
	}
	printFacts(out, "address", addresses, all)
	printFacts(out, "condition", conditions, all)
	printFacts(out, "fault", faults, all)
	return nil
}

// programsText lists the interfaces with programs, and their modes. Interfaces of pods are counted by pattern.
func programsText(attached []*shuntv1.Attachment) string {
	var parts []string
	for _, a := range control.Together(attached, false) {
		parts = append(parts, a.Interface+" "+cmp.Or(a.Mode, "not attached"))
	}
	return cmp.Or(strings.Join(parts, ", "), "none is attached")
}

// announcementText names the node that announces an address. It marks the conditions in its text as shown.
func announcementText(a *shuntv1.ClusterAddress, conditions []*shuntv1.Condition, shown map[*shuntv1.Condition]bool) string {
	codes, otherwise, several := []string{condition.AddressInUse, condition.AddressContested, condition.AnnounceFailed}, "announced here", "to be announced here"
	switch {
	case !a.Here && a.Node != "":
		otherwise, several = "node "+a.Node+" announces it", "to be announced by node "+a.Node
		codes = []string{condition.AddressTakenOver}
	case !a.Here:
		return "not announced here: its policy is Local, and this node has no endpoint that takes connections"
	}
	var texts []string
	for _, c := range conditions {
		if !slices.Contains(codes, c.Code) {
			continue
		}
		switch address, _, _ := strings.Cut(c.Subject, " on "); {
		case address == a.Address:
			texts, shown[c] = append(texts, c.Text), true
		case c.Subject == condition.Several:
			texts = append(texts, several+", unless it is among those of the condition "+c.Code)
		}
	}
	return cmp.Or(strings.Join(texts, "; "), otherwise)
}

// printCluster prints the facts of the cluster that do not depend on a daemon.
func printCluster(out io.Writer, c *shuntv1.Cluster) {
	server := cmp.Or(c.Apiserver, "of the cluster")
	switch {
	case c.ApiserverAwaySince != nil:
		fact(out, "apiserver", "%s, has not answered since %s, and its last state is in force: %s", server, clock(c.ApiserverAwaySince), c.ApiserverError)
	case c.ApiserverError != "":
		fact(out, "apiserver", "%s, answers, but refuses objects that it showed earlier; their last state is in force: %s", server, c.ApiserverError)
	default:
		fact(out, "apiserver", "%s, answers, and shows Services, EndpointSlices and Nodes", server)
	}
	words := append([]string{c.Node}, c.NodeAddresses...)
	if c.Zone != "" {
		words = append(words, "zone "+c.Zone)
	}
	for _, network := range c.PodNetworks {
		words = append(words, "pods in "+network)
	}
	fact(out, "node", "%s", strings.Join(words, ", "))
	s := c.Services
	var parts []string
	for _, part := range []struct {
		count uint64
		text  string
	}{{s.GetServed(), "served"}, {s.GetInPart(), "served in part"}, {s.GetUnserved(), "not served"}, {s.GetLeftAlone(), "left alone, as headless ones are"}} {
		if part.count > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", part.count, part.text))
		}
	}
	fact(out, "Services", "%s", cmp.Or(strings.Join(parts, ", "), "none"))
}

// faultText returns the fault of an object, with its remedy.
func faultText(f *shuntv1.ClusterFault) string {
	return fmt.Sprintf("%s: %s: %s", f.Object, f.Text, f.Remedy)
}

// fact prints a line with a word and a fact.
func fact(out io.Writer, word, format string, values ...any) {
	fmt.Fprintf(out, "%-9s  %s\n", word, fmt.Sprintf(format, values...))
}

// printFacts prints a line for each text, up to a number of them.
func printFacts(out io.Writer, word string, texts []string, all bool) {
	for i, text := range texts {
		if i == linesMax && !all {
			fact(out, word, "and %d more; --all shows each", len(texts)-i)
			return
		}
		fact(out, word, "%s", text)
	}
}

// clock returns a time in the local time zone.
func clock(t *timestamppb.Timestamp) string { return t.AsTime().Local().Format(time.DateTime) }
