package command

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/status"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/value"
)

// frontendsMax is the number of frontends of a service that are shown among others.
const frontendsMax = 8

// rows says how much of a status is shown.
type rows struct {
	summary bool          // a row for each service
	all     bool          // however long
	others  []cli.Product // which print their parts
}

// only keeps one service and its backends. Faults concern the whole instance, and stay.
func only(st *shuntv1.GetStatusResponse, service string) error {
	var names []string
	for _, s := range st.Services {
		names = append(names, s.Name)
	}
	i := slices.Index(names, service)
	if i < 0 {
		return fmt.Errorf("show service %q: no service has this name; there are %s", service, cmp.Or(value.Few(names), "none at all"))
	}
	st.Services = st.Services[i : i+1]
	st.Backends = slices.DeleteFunc(st.Backends, func(b *shuntv1.Backend) bool { return !slices.Contains(b.Services, service) })
	return nil
}

// printProducts shows the products of a daemon.
func printProducts(w io.Writer, all []*shuntv1.Product) {
	if len(all) == 0 {
		return
	}
	t := cli.NewTable(w)
	fmt.Fprintln(t, "\nPRODUCT\tSTATE")
	for _, p := range all {
		state := p.Does
		if p.Failed != "" {
			state = "failed: " + p.Failed
		}
		fmt.Fprintf(t, "%s\t%s\n", p.Name, state)
	}
	t.Flush()
}

// withoutBackends keeps the services' own numbers.
func withoutBackends(st *shuntv1.GetStatusResponse) {
	st.Backends = nil
	for _, s := range st.Services {
		s.Backends = nil
	}
}

func printStatus(w io.Writer, st *shuntv1.GetStatusResponse, elsewhere bool, show rows) {
	switch {
	case !st.Forwarding && st.Daemon != nil:
		does := "Not balancing"
		if works(st) {
			does = "Running"
		}
		fmt.Fprintf(w, "%s. The daemon is process %d, running since %s, with %s.\n", does, st.Daemon.Pid,
			st.Daemon.Since.AsTime().Local().Format(time.DateTime), st.Daemon.ConfigPath)
		printProducts(w, st.Daemon.Products)
		printOthers(w, st, show)
		printConditions(w, st, show)
		return
	case !st.Forwarding:
		fmt.Fprintf(w, "Instance %q is not forwarding: no data plane is loaded. `shunt run` starts one.\n", st.Instance)
		return
	case st.Daemon != nil:
		fmt.Fprintf(w, "Forwarding. The daemon is process %d, running since %s, with %s.\n", st.Daemon.Pid,
			st.Daemon.Since.AsTime().Local().Format(time.DateTime), st.Daemon.ConfigPath)
	case elsewhere:
		fmt.Fprintf(w, "Forwarding, and a daemon runs, but the command could not ask it: %s.\n", st.DaemonError)
	default:
		fmt.Fprintf(w, "Still forwarding %s without health checks since %s; `%s` ends it.\n", value.Counted(len(st.Services), "service"),
			st.UnattendedSince.AsTime().Local().Format(time.DateTime), node.DetachCommand(st.Instance))
		fmt.Fprintf(w, "There is no daemon: %s. `shunt run` takes over with all connections.\n", st.DaemonError)
	}
	if all := st.GetDaemon().GetProducts(); len(all) > 1 || len(all) == 1 && all[0].Failed != "" { // else the rest says it
		printProducts(w, all)
	}
	t := cli.NewTable(w)
	fmt.Fprintln(t, "\nINTERFACE\tMODE\tMISSED")
	for _, a := range control.Together(st.Attached, show.all) {
		missed := "-"
		if a.FramesMissed != nil {
			missed = strconv.FormatUint(*a.FramesMissed, 10)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", a.Interface, cmp.Or(a.Mode, "-"), missed)
	}
	t.Flush()
	printChained(w, st.Attached)
	printOthers(w, st, show)
	fmt.Fprintln(w)
	backends := 0
	for _, s := range st.Services {
		backends += len(s.Backends)
	}
	if show.summary || !show.all && backends > cli.RowsMax && len(st.Services) > 1 {
		printSummary(w, st.Services, show)
	} else {
		printServices(w, st.Services, show)
	}
	printUnwell(w, st, show)
	fmt.Fprintln(t, "\nREASON\tPACKETS\tBYTES")
	names := slices.SortedFunc(maps.Keys(st.Reasons), func(a, b string) int {
		return cmp.Or(cmp.Compare(st.Reasons[b].Packets, st.Reasons[a].Packets), strings.Compare(a, b))
	})
	for _, name := range names {
		fmt.Fprintf(t, "%s\t%d\t%d\n", name, st.Reasons[name].Packets, st.Reasons[name].Bytes)
	}
	t.Flush()
	printSockets(w, st.Sockets)
	printConditions(w, st, show)
}

// printOthers prints the other products' parts.
func printOthers(w io.Writer, st *shuntv1.GetStatusResponse, show rows) {
	for _, p := range show.others {
		if p.PrintStatus != nil {
			p.PrintStatus(w, st, show.all)
		}
	}
}

// printSockets prints the outcomes of calls of sockets that are served, if there were any.
func printSockets(w io.Writer, outcomes map[string]uint64) {
	if len(outcomes) == 0 {
		return
	}
	t := cli.NewTable(w)
	fmt.Fprintln(t, "\nSOCKETS\tCALLS")
	for _, name := range slices.SortedFunc(maps.Keys(outcomes), func(a, b string) int {
		return cmp.Or(cmp.Compare(outcomes[b], outcomes[a]), strings.Compare(a, b))
	}) {
		fmt.Fprintf(t, "%s\t%d\n", name, outcomes[name])
	}
	t.Flush()
}

// printChained prints the programs on interfaces with other programs beside shunt's, if there are any.
func printChained(w io.Writer, attached []*shuntv1.Attachment) {
	t := cli.NewTable(w)
	header := "\nINTERFACE\tPOSITION\tPROGRAM\tID\n"
	for _, a := range attached {
		first := a.Interface
		for _, p := range a.Chain {
			fmt.Fprintf(t, "%s%s\t%s\t%s\t%d\n", header, first, positionCell(p.Position), p.Name, p.Id)
			header, first = "", ""
		}
	}
	t.Flush()
}

// printServices prints a row for each backend. Every row has every column, so that they are aligned over all
// services.
func printServices(w io.Writer, services []*shuntv1.Service, show rows) {
	t := cli.NewTable(w)
	fmt.Fprintln(t, "SERVICE\tBACKEND\tNAME\tSTATE\tSLOTS\tSHARE\t"+trafficColumns)
	more := 0
	for _, s := range services {
		fmt.Fprintf(t, "%s (%s)\t\t\t\t\t\t%s\n", s.Name, s.Forwarding, columns(s, s.FlowsOpen != nil))
		frontends, others := cli.First(s.Frontends, frontendsMax, show.all || len(services) == 1)
		for _, f := range frontends {
			fmt.Fprintf(t, "\t← %s\t\t\t\t\t\t\t\t\t\t\n", f)
		}
		if len(s.Frontends) == 0 {
			fmt.Fprint(t, "\t← nothing: another service has its frontends; its flows go on\t\t\t\t\t\t\t\t\t\t\n")
		}
		if others > 0 {
			fmt.Fprintf(t, "\t← and %d more\t\t\t\t\t\t\t\t\t\t\n", others)
		}
		backends, left := cli.First(s.Backends, cli.RowsMax, show.all)
		more += left
		for _, b := range backends {
			fmt.Fprintf(t, "\t%s\t%s\t%s\t%d\t%.1f %%\t%s\n", b.Address, nameBeside(b.Name, b.Address), b.State, b.Slots, 100*b.Share, columns(b, b.FlowsOpen != nil))
		}
	}
	t.Flush()
	printMore(w, more, "backend")
}

// nameBeside returns a name, if it differs from the address.
func nameBeside(name, address string) string {
	if name == address {
		return ""
	}
	return name
}

// printMore says how many rows are not shown, and how to see them.
func printMore(w io.Writer, left int, noun string) {
	if left > 0 {
		fmt.Fprintf(w, "%s more; --all shows every one, --service NAME shows one service.\n", value.Counted(left, noun))
	}
}

// printSummary prints a row for each service.
func printSummary(w io.Writer, services []*shuntv1.Service, show rows) {
	t := cli.NewTable(w)
	fmt.Fprintln(t, "SERVICE\tFRONTENDS\tBACKENDS\tWITH NEW FLOWS\t"+trafficColumns)
	shown, left := cli.First(services, cli.RowsMax, show.all)
	for _, s := range shown {
		addresses, open := map[string]bool{}, map[string]bool{}
		for _, b := range s.Backends {
			addresses[b.Address] = true
			if b.Slots > 0 {
				open[b.Address] = true
			}
		}
		fmt.Fprintf(t, "%s (%s)\t%d\t%d\t%d\t%s\n", s.Name, s.Forwarding, len(s.Frontends), len(addresses), len(open), columns(s, s.FlowsOpen != nil))
	}
	t.Flush()
	printMore(w, left, "service")
	if !show.summary {
		fmt.Fprintln(w, "There are too many backends to show; --service NAME shows the backends of a service, --all shows every backend.")
	}
}

// printUnwell lists the backends that are not healthy, with the reason.
func printUnwell(w io.Writer, st *shuntv1.GetStatusResponse, show rows) {
	var lines []string
	for _, b := range st.Backends {
		for _, h := range b.Health {
			if text := healthText(h); text != "" && (h.State != string(model.HealthUp) || h.LastError != "" || h.Override != "") {
				lines = append(lines, b.Address+" "+text)
			}
		}
	}
	printLines(w, "\nNOT WELL", lines, show)
}

// printLines has a heading and lines, if there are any.
func printLines(w io.Writer, heading string, lines []string, show rows) {
	if len(lines) == 0 {
		return
	}
	fmt.Fprintln(w, heading)
	shown, left := cli.First(lines, cli.RowsMax, show.all)
	for _, line := range shown {
		fmt.Fprintln(w, line)
	}
	if left > 0 {
		fmt.Fprintf(w, "%d more; --all shows every one.\n", left)
	}
}

const trafficColumns = "OPEN\tFLOWS\tPACKETS IN\tBYTES IN\tPACKETS OUT\tBYTES OUT"

// traffic is implemented by messages with counters.
type traffic interface {
	GetPacketsIn() uint64
	GetBytesIn() uint64
	GetPacketsOut() uint64
	GetBytesOut() uint64
	GetFlowsCreated() uint64
	GetFlowsOpen() uint64
}

// columns returns a row's columns; known reports whether the open flows are known.
func columns(t traffic, known bool) string {
	open := "-"
	if known {
		open = fmt.Sprint(t.GetFlowsOpen())
	}
	return fmt.Sprintf("%s\t%d\t%d\t%d\t%d\t%d", open, t.GetFlowsCreated(), t.GetPacketsIn(), t.GetBytesIn(), t.GetPacketsOut(), t.GetBytesOut())
}

func printConditions(w io.Writer, st *shuntv1.GetStatusResponse, show rows) {
	if st.Daemon == nil {
		return
	}
	if len(st.Daemon.Conditions) == 0 {
		fmt.Fprintln(w, "\nshunt has found no fault.")
		return
	}
	var lines []string
	for _, c := range st.Daemon.Conditions {
		lines = append(lines, fmt.Sprintf("%s: %s (%s): %s\n  since %s; %s", c.Severity, c.Code, c.Subject, c.Text, c.Since.AsTime().Local().Format(time.DateTime), c.Remedy))
	}
	printLines(w, "\nCONDITIONS", lines, show)
}

// printBackends prints a row for each backend over all its services. If not all are shown, backends that get no
// new flows come first. conditions are the daemon's.
func printBackends(w io.Writer, backends []*shuntv1.Backend, conditions []*shuntv1.Condition, show rows) {
	if !show.all && len(backends) > cli.RowsMax {
		backends = slices.Clone(backends)
		slices.SortStableFunc(backends, func(a, b *shuntv1.Backend) int { return cmp.Compare(rank(a), rank(b)) })
	}
	t := cli.NewTable(w)
	fmt.Fprintln(t, "BACKEND\tNAME\tSTATE\tSERVICES\tSLOTS\t"+trafficColumns)
	shown, left := cli.First(backends, cli.RowsMax, show.all)
	for _, b := range shown {
		services, more := cli.First(b.Services, frontendsMax, show.all)
		text := strings.Join(services, ",")
		if more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\n", b.Address, strings.Join(b.Names, ","), b.State, text, b.Slots, columns(b, b.FlowsOpen != nil))
	}
	t.Flush()
	printMore(w, left, "backend")
	var lines []string
	for _, c := range conditions {
		if c.Code == condition.NeighbourUnresolved {
			who := c.Subject
			if who == condition.Several {
				who = c.Code // the text says which
			}
			lines = append(lines, fmt.Sprintf("%s: %s.", who, c.Text))
		}
	}
	for _, b := range backends {
		for _, o := range b.Overrides {
			lines = append(lines, fmt.Sprintf("%s: %s.", b.Address, overrideText(o, b.State)))
		}
		for _, h := range b.Health {
			if text := healthText(h); text != "" {
				lines = append(lines, fmt.Sprintf("%s %s.", b.Address, text))
			}
		}
	}
	printLines(w, "", lines, show)
}

// rank returns the order in which backends are shown if there is no room for all.
func rank(b *shuntv1.Backend) int {
	if b.State == status.StateActive {
		return 1
	}
	return 0
}
