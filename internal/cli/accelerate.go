package cli

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/spf13/cobra"
)

// takenState is what pods and packets are that take the shortcut; all others have a reason.
const takenState = "taken"

// shownPods is the pod shortcut as commands show it.
var shownPods = shownProduct{name: "accelerate", it: "the pod shortcut", show: "show the pods", page: "docs/guide/pods.md"}

func newAccelerate(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "accelerate",
		Short: "Show the pod shortcut: pods of this host whose packets to each other skip the host's stack",
		Long: `Show the pods of the configuration's key accelerate: which of them take the shortcut, and what became of
the packets that each of them has sent.

TAKEN packets went straight to another pod. LEFT ones went through the host's stack, each for a reason:
docs/guide/pods.md lists them.`,
		Example: `  shunt accelerate list        # a row for each pod
  shunt accelerate show cali1  # all about one: its addresses, and its packets by reason`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newAccelerateList(s), newAccelerateShow(s))
	return c
}

func newAccelerateList(s streams) *cobra.Command {
	o := productReading{of: shownPods}
	c := &cobra.Command{
		Use:   "list",
		Short: "List the pods, a row for each",
		Example: `  shunt accelerate list
  shunt accelerate list -o json`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			st, err := o.status(c.Context(), c)
			if err != nil {
				return err
			}
			a := st.GetAcceleration()
			if o.output == "json" {
				return writeMessage(s.out, a)
			}
			printPods(s.out, a, true)
			return nil
		},
	}
	o.flags(c)
	return c
}

func newAccelerateShow(s streams) *cobra.Command {
	o := productReading{of: shownPods}
	c := &cobra.Command{
		Use:   "show INTERFACE",
		Short: "Show one pod by the host's end of its veth: its addresses, and its packets by reason",
		Example: `  shunt accelerate show cali1
  shunt accelerate show cali1 -o json | jq .counts`,
		Args: oneOf("interface", "shunt accelerate list"),
		RunE: func(c *cobra.Command, args []string) error {
			st, err := o.status(c.Context(), c)
			if err != nil {
				return err
			}
			a := st.GetAcceleration()
			i := slices.IndexFunc(a.Pods, func(p *shuntv1.AcceleratedPod) bool { return p.Interface == args[0] })
			if i < 0 {
				var names []string
				for _, p := range a.Pods {
					names = append(names, p.Interface)
				}
				return fmt.Errorf("show the pod behind %q: there is none; there are %s", args[0], cmp.Or(value.Few(names), "none at all"))
			}
			if o.output == "json" {
				return writeMessage(s.out, a.Pods[i])
			}
			printPod(s.out, a.Pods[i])
			return nil
		},
	}
	o.flags(c)
	return c
}

// split is how many packets took the shortcut, how many were left, and the reason for most of these.
func split(counts map[string]*shuntv1.Count) (taken, left uint64, most string) {
	for _, name := range countsInOrder(counts) {
		n := counts[name].Packets
		if name == takenState {
			taken += n
			continue
		}
		if left += n; most == "" {
			most = name
		}
	}
	return taken, left, most
}

// countsInOrder are the names, those with the most packets first.
func countsInOrder(counts map[string]*shuntv1.Count) []string {
	return slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b].Packets, counts[a].Packets), strings.Compare(a, b))
	})
}

// stateText is the state of a pod's addresses, each once.
func stateText(p *shuntv1.AcceleratedPod) string {
	var states []string
	for _, a := range p.Addresses {
		if !slices.Contains(states, a.State) {
			states = append(states, a.State)
		}
	}
	return strings.Join(states, ", ")
}

// printPods shows a row for each pod; without all of them, as many as fit among others.
func printPods(w io.Writer, a *shuntv1.Acceleration, all bool) {
	switch {
	case !a.SameNode:
		fmt.Fprintln(w, "The pod shortcut is off: same_node is false.")
		return
	case len(a.Pods) == 0:
		fmt.Fprintln(w, "There are no pods yet. One that starts is found.")
		return
	}
	t := newTable(w)
	fmt.Fprintln(t, "POD\tADDRESSES\tSTATE\tTAKEN\tLEFT\tMOST LEFT FOR")
	pods, more := first(a.Pods, rowsMax, all)
	for _, p := range pods {
		var addresses []string
		for _, one := range p.Addresses {
			if one.Address != "" {
				addresses = append(addresses, one.Address)
			}
		}
		taken, left, most := split(p.Counts)
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%s\n", p.Interface, cmp.Or(strings.Join(addresses, " "), "-"), stateText(p), taken, left, cmp.Or(most, "-"))
	}
	taken, left, most := split(a.Counts)
	fmt.Fprintf(t, "all pods\t\t%s\t%d\t%d\t%s\n", a.Mode, taken, left, cmp.Or(most, "-"))
	t.flush()
	if more > 0 {
		fmt.Fprintf(w, "%s more: `shunt accelerate list`.\n", value.Counted(more, "pod"))
	}
}

// printAcceleration shows the pods in a status, if it is about them.
func printAcceleration(w io.Writer, st *shuntv1.GetStatusResponse, show rows) {
	if st.Acceleration != nil {
		fmt.Fprintln(w)
		printPods(w, st.Acceleration, show.all)
	}
}

func printPod(w io.Writer, p *shuntv1.AcceleratedPod) {
	attached := "The program is not at its veth."
	if p.Attached != "" {
		attached = "The program is at its veth by " + p.Attached + "."
	}
	fmt.Fprintf(w, "Pod behind interface %s. %s\n\n", p.Interface, attached)
	t := newTable(w)
	fmt.Fprintln(t, "ADDRESS\tSTATE\tWHY")
	for _, a := range p.Addresses {
		fmt.Fprintf(t, "%s\t%s\t%s\n", cmp.Or(a.Address, "-"), a.State, cmp.Or(a.Why, "-"))
	}
	t.flush()
	fmt.Fprintln(w)
	if len(p.Counts) == 0 {
		fmt.Fprintln(w, "It has sent nothing yet.")
		return
	}
	t = newTable(w)
	fmt.Fprintln(t, "SENT\tPACKETS\tBYTES")
	for _, name := range countsInOrder(p.Counts) {
		fmt.Fprintf(t, "%s\t%d\t%d\n", name, p.Counts[name].Packets, p.Counts[name].Bytes)
	}
	t.flush()
}
