package command

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
)

// takenState is the state of pods and packets that take the shortcut; all others have a reason.
const takenState = "taken"

// shownPods is the pod shortcut as commands show it.
var shownPods = cli.ShownProduct{Name: "accelerate", It: "the pod shortcut", Show: "show the pods", Page: "docs/guide/pods.md"}

func newAccelerate(s cli.Streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "accelerate",
		Short: "Show the pod shortcut: pods whose packets to each other skip the host's stack",
		Long: `Show the pods of the configuration's key accelerate: which of them use the shortcut, and where the packets
went that each pod sent.

TAKEN packets went straight to another pod. LEFT packets went through the host's stack, each for a reason;
docs/guide/pods.md lists the reasons.`,
		Example: `  shunt accelerate list        # a row for each pod
  shunt accelerate show cali1  # one pod: its addresses, and its packets by reason
  shunt accelerate show eth0   # one uplink: the networks beyond it, and the packets that came in for pods
  shunt accelerate show dns    # one entry of steer
  shunt accelerate show sockets  # paired sockets: features that this kernel breaks, and messages that went by TCP`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newAccelerateList(s), newAccelerateShow(s))
	return c
}

func newAccelerateList(s cli.Streams) *cobra.Command {
	o := cli.ProductReading{Of: shownPods}
	c := &cobra.Command{
		Use:   "list",
		Short: "List the pods, the uplinks and the steers, a row for each",
		Example: `  shunt accelerate list
  shunt accelerate list -o json`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			st, err := o.Status(c.Context(), c)
			if err != nil {
				return err
			}
			a := st.GetAcceleration()
			if o.Output == "json" {
				return cli.WriteMessage(s.Out, a)
			}
			printPods(s.Out, a, true)
			return nil
		},
	}
	o.Flags(c)
	return c
}

func newAccelerateShow(s cli.Streams) *cobra.Command {
	o := cli.ProductReading{Of: shownPods}
	c := &cobra.Command{
		Use:   "show INTERFACE|STEER",
		Short: "Show one pod by the host's end of its veth, one uplink, or one entry of steer, with its packets by reason",
		Example: `  shunt accelerate show cali1
  shunt accelerate show cali1 -o json | jq .counts`,
		Args: cli.OneOf("interface", "shunt accelerate list"),
		RunE: func(c *cobra.Command, args []string) error {
			st, err := o.Status(c.Context(), c)
			if err != nil {
				return err
			}
			return showAccelerated(s.Out, st.GetAcceleration(), args[0], o.Output == "json")
		},
	}
	o.Flags(c)
	return c
}

// showAccelerated shows the pod or the uplink with an interface, or the steer with that name.
func showAccelerated(w io.Writer, a *shuntv1.Acceleration, name string, asJSON bool) error {
	type shown struct {
		name    string
		message proto.Message
		print   func()
	}
	var all []shown
	for _, p := range a.GetPods() {
		all = append(all, shown{p.Interface, p, func() { printPod(w, p) }})
	}
	for _, u := range a.GetUplinks() {
		all = append(all, shown{u.Interface, u, func() { printUplink(w, a, u) }})
	}
	for _, s := range a.GetSteers() {
		all = append(all, shown{s.Name, s, func() { printSteer(w, s) }})
	}
	if a.GetSockets() != nil {
		all = append(all, shown{"sockets", a.Sockets, func() { printSocketPairs(w, a.Sockets) }})
	}
	var names []string
	for _, one := range all {
		switch {
		case one.name != name:
			names = append(names, one.name)
		case asJSON:
			return cli.WriteMessage(w, one.message)
		default:
			one.print()
			return nil
		}
	}
	return fmt.Errorf("show the pod behind %q: no pod, uplink or steer has this name; there are %s", name, cmp.Or(value.Few(names), "none at all"))
}

// split returns the number of packets that took the shortcut, the number that were left, and the most frequent
// reason of the latter.
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

// countsInOrder returns the names, those with the most packets first.
func countsInOrder(counts map[string]*shuntv1.Count) []string {
	return slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b].Packets, counts[a].Packets), strings.Compare(a, b))
	})
}

// stateText returns the states of a pod's addresses, each once.
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
	defer printPairs(w, a.Sockets)
	switch {
	case !a.SameNode:
		fmt.Fprintln(w, "The pod shortcut is off: same_node is false.")
		return
	case len(a.Pods) == 0:
		fmt.Fprintln(w, "There are no pods yet. shunt finds each pod that starts.")
		printUplinks(w, a)
		printSteers(w, a)
		return
	}
	t := cli.NewTable(w)
	fmt.Fprintln(t, "POD\tADDRESSES\tSTATE\tTAKEN\tLEFT\tMOST LEFT FOR")
	pods, more := cli.First(a.Pods, cli.RowsMax, all)
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
	fmt.Fprintf(t, "all\t\t%s\t%d\t%d\t%s\n", a.Mode, taken, left, cmp.Or(most, "-"))
	t.Flush()
	if more > 0 {
		fmt.Fprintf(w, "%s more: `shunt accelerate list`.\n", value.Counted(more, "pod"))
	}
	printUplinks(w, a)
	printSteers(w, a)
}

// printSteers shows a row for each steer, if there are any.
func printSteers(w io.Writer, a *shuntv1.Acceleration) {
	if len(a.Steers) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := cli.NewTable(w)
	fmt.Fprintln(t, "STEER\tPORTS\tTO\tINTERFACE\tSTATE\tTAKEN\tLEFT\tMOST LEFT FOR")
	for _, one := range a.Steers {
		taken, left, most := split(one.Counts)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\n", one.Name, strings.Join(one.Ports, " "), one.Network, one.Interface, one.State, taken, left, cmp.Or(most, "-"))
	}
	t.Flush()
}

func printSteer(w io.Writer, one *shuntv1.AcceleratedSteer) {
	fmt.Fprintf(w, "Steer %s: ports %s to %s go through %s to the next hop %s.\n", one.Name, strings.Join(one.Ports, ", "), one.Network, one.Interface, one.NextHop)
	if one.State != takenState {
		fmt.Fprintf(w, "Now its packets follow the host's routes: %s: %s.\n", one.State, one.Why)
	}
	fmt.Fprintln(w)
	printCounts(w, "WENT", "No packet has matched it yet.", one.Counts)
}

// printUplinks shows a row for each uplink, if there are any.
func printUplinks(w io.Writer, a *shuntv1.Acceleration) {
	if len(a.Uplinks) == 0 {
		return
	}
	fmt.Fprintln(w)
	t := cli.NewTable(w)
	fmt.Fprintln(t, "UPLINK\tNETWORKS\tSTATE\tTAKEN IN\tLEFT IN\tMOST LEFT FOR")
	for _, u := range a.Uplinks {
		var states []string
		networks := beyond(a, u.Interface)
		for _, n := range networks {
			if !slices.Contains(states, n.State) {
				states = append(states, n.State)
			}
		}
		taken, left, most := split(u.Counts)
		fmt.Fprintf(t, "%s\t%d\t%s\t%d\t%d\t%s\n", u.Interface, len(networks), cmp.Or(strings.Join(states, ", "), "none"), taken, left, cmp.Or(most, "-"))
	}
	t.Flush()
}

// beyond returns the networks that an uplink leads to.
func beyond(a *shuntv1.Acceleration, uplink string) (networks []*shuntv1.AcceleratedNetwork) {
	for _, n := range a.Networks {
		if n.Interface == uplink {
			networks = append(networks, n)
		}
	}
	return networks
}

func printUplink(w io.Writer, a *shuntv1.Acceleration, u *shuntv1.AcceleratedUplink) {
	fmt.Fprintf(w, "Uplink %s. %s\n\n", u.Interface, attachedText(u.Attached, "its ingress"))
	networks := beyond(a, u.Interface)
	if len(networks) == 0 {
		fmt.Fprintf(w, "No network is beyond it: %s.\n\n", cmp.Or(u.Why, "shunt has not looked at it yet"))
	} else {
		t := cli.NewTable(w)
		fmt.Fprintln(t, "NETWORK\tNEXT HOP\tSTATE\tWHY")
		// Routes of their own inside these networks, by no uplink, are left alone too.
		for _, n := range append(networks, beyond(a, "")...) {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", n.Network, cmp.Or(n.NextHop, "-"), n.State, cmp.Or(n.Why, "-"))
		}
		t.Flush()
		fmt.Fprintln(w)
	}
	printCounts(w, "CAME IN", "No packet for a pod has come in by it yet.", u.Counts)
}

// attachedText names the mode of the program at a place, or says that it is not there.
func attachedText(mode, where string) string {
	if mode == "" {
		return "The program is not at " + where + "."
	}
	return "The program is at " + where + " by " + mode + "."
}

// printCounts shows packets by outcome.
func printCounts(w io.Writer, head, none string, counts map[string]*shuntv1.Count) {
	if len(counts) == 0 {
		fmt.Fprintln(w, none)
		return
	}
	t := cli.NewTable(w)
	fmt.Fprintln(t, head+"\tPACKETS\tBYTES")
	for _, name := range countsInOrder(counts) {
		fmt.Fprintf(t, "%s\t%d\t%d\n", name, counts[name].Packets, counts[name].Bytes)
	}
	t.Flush()
}

// printAcceleration shows the pods in a status, if it is about them.
func printAcceleration(w io.Writer, st *shuntv1.GetStatusResponse, all bool) {
	if st.Acceleration != nil {
		fmt.Fprintln(w)
		printPods(w, st.Acceleration, all)
	}
}

func printPod(w io.Writer, p *shuntv1.AcceleratedPod) {
	fmt.Fprintf(w, "Pod behind interface %s. %s\n\n", p.Interface, attachedText(p.Attached, "its veth"))
	t := cli.NewTable(w)
	fmt.Fprintln(t, "ADDRESS\tSTATE\tWHY")
	for _, a := range p.Addresses {
		fmt.Fprintf(t, "%s\t%s\t%s\n", cmp.Or(a.Address, "-"), a.State, cmp.Or(a.Why, "-"))
	}
	t.Flush()
	fmt.Fprintln(w)
	printCounts(w, "SENT", "It has sent no packet yet.", p.Counts)
}

// printPairs shows a row for the paired sockets, if sockets are to be paired.
func printPairs(w io.Writer, p *shuntv1.SocketPairs) {
	if p == nil {
		return
	}
	fmt.Fprintln(w)
	t := cli.NewTable(w)
	fmt.Fprintln(t, "SOCKETS OF\tPORTS\tSTATE\tPAIRED\tTAKEN\tLEFT\tMOST LEFT FOR")
	messages, _ := socketCounts(p)
	taken, left, most := split(messages)
	fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%d\t%s\n", strings.Join(p.Cgroups, " "), cmp.Or(strings.Join(p.Ports, " "), "all"), p.State, p.Paired, taken, left, cmp.Or(most, "-"))
	t.Flush()
}

// socketCounts count messages and connections by outcome.
func socketCounts(p *shuntv1.SocketPairs) (messages, connections map[string]*shuntv1.Count) {
	messages, connections = map[string]*shuntv1.Count{}, map[string]*shuntv1.Count{}
	for name, n := range p.Counts {
		if sockets.IsConnection(name) {
			connections[name] = n
		} else {
			messages[name] = n
		}
	}
	return messages, connections
}

func printSocketPairs(w io.Writer, p *shuntv1.SocketPairs) {
	fmt.Fprintf(w, "Sockets of %s, ports %s: %s. %d are paired now; %d bytes wait, at most %d at each socket.\n",
		strings.Join(p.Cgroups, ", "), cmp.Or(strings.Join(p.Ports, ", "), "all"), p.State, p.Paired, p.Waiting, p.Limit)
	if p.Why != "" {
		fmt.Fprintf(w, "Why: %s.\n", p.Why)
	}
	fmt.Fprintln(w)
	t := cli.NewTable(w)
	fmt.Fprintln(t, "TRIED\tRESULT\tWHAT")
	for _, c := range p.Checks {
		result := "right"
		switch {
		case c.Broken != "" && c.Waived:
			result = "broken, unused"
		case c.Broken != "":
			result = "broken"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", c.Name, result, cmp.Or(c.Broken, "-"))
	}
	t.Flush()
	fmt.Fprintln(w)
	messages, connections := socketCounts(p)
	printCounts(w, "MESSAGES", "No message has been sent yet.", messages)
	if len(connections) > 0 {
		fmt.Fprintln(w)
		t := cli.NewTable(w)
		fmt.Fprintln(t, "CONNECTIONS\tNUMBER")
		for _, name := range countsInOrder(connections) {
			fmt.Fprintf(t, "%s\t%d\n", name, connections[name].Packets)
		}
		t.Flush()
	}
}
