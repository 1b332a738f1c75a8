package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/daemon"
	"github.com/shunt-lb/shunt/internal/datapath"
	"github.com/shunt-lb/shunt/internal/model"
	"github.com/shunt-lb/shunt/internal/status"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// answerTimeout is for questions that the daemon answers from memory.
const answerTimeout = 5 * time.Second

// reading is the flags of a command that shows an instance.
type reading struct{ instance, socket, output string }

func (o *reading) flags(c *cobra.Command) {
	instanceFlag(c, &o.instance)
	socketFlag(c, &o.socket)
	outputFlag(c, &o.output)
}

func newStatus(s streams) *cobra.Command {
	var o reading
	c := &cobra.Command{
		Use:   "status",
		Short: "What is forwarded where, and what was counted; works when the daemon is dead, too",
		Args:  noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			st, elsewhere, err := o.status(c)
			if err != nil {
				return err
			}
			if o.output == "json" {
				err = writeMessage(s.out, st)
			} else {
				printStatus(s.out, st, elsewhere)
			}
			if err == nil && !st.Forwarding {
				err = errSilent
			}
			return err
		},
	}
	o.flags(c)
	return c
}

// askReading asks at the socket, or at the one for reading if that is all this user may open.
func askReading(socket string, ask func(*control.Client) error) error {
	err := ask(control.NewClient(socket))
	if errors.Is(err, control.ErrDenied) {
		if second := ask(control.NewClient(control.ReadSocket(socket))); second == nil || !errors.Is(second, control.ErrDenied) {
			return second
		}
		return fmt.Errorf("ask the daemon at %s: %w; run it with sudo, or have root add you to the group of `api: {read_group: …}`", socket, control.ErrDenied)
	}
	return err
}

// status asks the daemon, and reads the maps itself if there is none. elsewhere: nothing died
// at this socket, it was never there.
func (o *reading) status(c *cobra.Command) (st *shuntv1.GetStatusResponse, elsewhere bool, err error) {
	if err := errors.Join(requireOutput(o.output), requireInstance(o.instance)); err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(c.Context(), answerTimeout)
	defer cancel()
	err = askReading(o.socket, func(c *control.Client) (err error) {
		st, err = c.Status(ctx)
		return err
	})
	if err == nil && st.Instance != o.instance {
		err, elsewhere = fmt.Errorf("the daemon at %s runs instance %q", o.socket, st.Instance), true
	}
	if err == nil {
		return st, false, nil
	}
	elsewhere = elsewhere || errors.Is(err, control.ErrNoSocket) && daemon.Holder(o.instance) != 0
	if errors.Is(err, control.ErrDenied) {
		return nil, false, err
	}
	if os.Geteuid() != 0 {
		return nil, false, fmt.Errorf("%w. Root can read the maps without a daemon: `sudo %s`", err, c.CommandPath())
	}
	silent := err.Error()
	dp, err := datapath.OpenReadOnly(datapath.Options{Instance: o.instance})
	if errors.Is(err, datapath.ErrNotLoaded) {
		return &shuntv1.GetStatusResponse{Instance: o.instance, DaemonError: silent}, elsewhere, nil
	}
	if err != nil {
		return nil, false, err
	}
	defer dp.Close() //nolint:errcheck // nothing was written
	st, beat, err := status.Read(dp, o.instance)
	if err != nil {
		return nil, false, err
	}
	st.DaemonError = silent
	elsewhere = elsewhere && st.HeartbeatAgeSeconds < status.HeartbeatFresh
	if !elsewhere {
		st.UnattendedSince = timestamppb.New(beat.Round(time.Millisecond))
	}
	return st, elsewhere, nil
}

func printStatus(w io.Writer, st *shuntv1.GetStatusResponse, elsewhere bool) {
	switch {
	case !st.Forwarding:
		fmt.Fprintf(w, "Instance %q is not forwarding: no data plane is loaded. `shunt run` starts one.\n", st.Instance)
		return
	case st.Daemon != nil:
		fmt.Fprintf(w, "Forwarding. The daemon is process %d, running since %s, with %s.\n", st.Daemon.Pid,
			st.Daemon.Since.AsTime().Local().Format(time.DateTime), st.Daemon.ConfigPath)
	case elsewhere:
		fmt.Fprintf(w, "Forwarding, and a daemon is alive, but this is not how to ask it: %s.\n", st.DaemonError)
	default:
		fmt.Fprintf(w, "Still forwarding %s without health checks since %s; `%s` ends it.\n", counted(len(st.Services), "service"),
			st.UnattendedSince.AsTime().Local().Format(time.DateTime), daemon.DetachCommand(st.Instance))
		fmt.Fprintf(w, "There is no daemon: %s. `shunt run` takes over with all connections.\n", st.DaemonError)
	}
	unwell := unwellIn(st)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "\nINTERFACE\tMODE")
	for _, a := range st.Attached {
		fmt.Fprintf(t, "%s\t%s\n", a.Interface, a.Mode)
	}
	fmt.Fprintln(t, "\nSERVICE\tBACKEND\tSLOTS\tSHARE\t"+trafficColumns)
	for _, s := range st.Services {
		fmt.Fprintf(t, "%s (%s)\t\t\t\t%s\n", s.Name, s.Forwarding, columns(s))
		for _, b := range s.Backends {
			fmt.Fprintf(t, "\t%s\t%d\t%.1f %%\t%s\n", b.Address, b.Slots, 100*b.Share, columns(b))
		}
		for _, line := range unwell[s.Name] {
			fmt.Fprintf(t, "\t✗ %s\n", line)
		}
		for _, f := range s.Frontends {
			fmt.Fprintf(t, "\t← %s\n", f)
		}
	}
	fmt.Fprintln(t, "\nREASON\tPACKETS\tBYTES")
	names := slices.SortedFunc(maps.Keys(st.Reasons), func(a, b string) int {
		return cmp.Or(cmp.Compare(st.Reasons[b].Packets, st.Reasons[a].Packets), strings.Compare(a, b))
	})
	for _, name := range names {
		fmt.Fprintf(t, "%s\t%d\t%d\n", name, st.Reasons[name].Packets, st.Reasons[name].Bytes)
	}
	_ = t.Flush()
	printConditions(w, st)
}

// unwellIn says of each service which backends are not well.
func unwellIn(st *shuntv1.GetStatusResponse) map[string][]string {
	unwell := map[string][]string{}
	for _, b := range st.Backends {
		for _, h := range b.Health {
			if text := healthText(h); text != "" && (h.State != string(model.HealthUp) || h.LastError != "" || h.Override != "") {
				unwell[h.Service] = append(unwell[h.Service], b.Address+" "+text)
			}
		}
	}
	return unwell
}

const trafficColumns = "FLOWS\tPACKETS IN\tBYTES IN\tPACKETS OUT\tBYTES OUT"

// traffic is what has counters.
type traffic interface {
	GetPacketsIn() uint64
	GetBytesIn() uint64
	GetPacketsOut() uint64
	GetBytesOut() uint64
	GetFlowsCreated() uint64
}

func columns(t traffic) string {
	return fmt.Sprintf("%d\t%d\t%d\t%d\t%d", t.GetFlowsCreated(), t.GetPacketsIn(), t.GetBytesIn(), t.GetPacketsOut(), t.GetBytesOut())
}

func printConditions(w io.Writer, st *shuntv1.GetStatusResponse) {
	if st.Daemon == nil {
		return
	}
	if len(st.Daemon.Conditions) == 0 {
		fmt.Fprintln(w, "\nNothing is wrong that shunt knows of.")
		return
	}
	fmt.Fprintln(w, "\nCONDITIONS")
	for _, c := range st.Daemon.Conditions {
		fmt.Fprintf(w, "%s: %s (%s): %s\n  since %s; %s\n", c.Severity, c.Code, c.Subject, c.Text, c.Since.AsTime().Local().Format(time.DateTime), c.Remedy)
	}
}
