package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/datapath"
	"github.com/shunt-lb/shunt/internal/reconcile"
	"github.com/spf13/cobra"
)

// status is everything `shunt status` shows; its JSON is the command's -o json.
type status struct {
	Instance   string                      `json:"instance"`
	Forwarding bool                        `json:"forwarding"` // a data plane is loaded
	Daemon     *control.Status             `json:"daemon"`     // null: no daemon answers
	Silent     string                      `json:"daemon_error,omitempty"`
	elsewhere  bool                        // nothing died at this socket: it was never there
	Heartbeat  float64                     `json:"heartbeat_age_seconds"`
	Attached   []attached                  `json:"attached"`
	Services   []serviceStatus             `json:"services"`
	Reasons    map[string]datapath.Count   `json:"reasons"` // those that have counted anything
	traffic    map[string]datapath.Traffic // of every backend in the maps, by address
}

// heartbeatFresh is the age in seconds below which there must be a daemon: it beats every
// second.
const heartbeatFresh = 1.5

type attached struct {
	Interface string `json:"interface"`
	Mode      string `json:"mode"`
}

type serviceStatus struct {
	Name       string   `json:"name"`
	Forwarding string   `json:"forwarding"`
	Frontends  []string `json:"frontends"`
	datapath.Traffic
	Backends []backendStatus `json:"backends"`
}

type backendStatus struct {
	Address string  `json:"address"`
	Slots   int     `json:"slots"`
	Share   float64 `json:"share"` // of the slots of its family, 0 to 1
	// Draining: it has weight 0, or an operator drains it.
	Draining bool `json:"draining"`
	// Counters are the backend's, over all services that share it.
	datapath.Traffic
}

func newStatus(s streams) *cobra.Command {
	var instance, socket, output string
	c := &cobra.Command{
		Use:   "status",
		Short: "What is forwarded where, and what was counted; works when the daemon is dead, too",
		Args:  noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := requireOutput(output); err != nil {
				return err
			}
			if err := requireRoot("status"); err != nil {
				return err
			}
			if err := requireInstance(instance); err != nil {
				return err
			}
			st, err := readStatus(c.Context(), instance, socket)
			if err != nil {
				return err
			}
			if output == "json" {
				err = writeJSON(s.out, st)
			} else {
				printStatus(s.out, st)
			}
			if err == nil && !st.Forwarding {
				err = errSilent
			}
			return err
		},
	}
	instanceFlag(c, &instance)
	socketFlag(c, &socket)
	outputFlag(c, &output)
	return c
}

func readStatus(ctx context.Context, instance, socket string) (status, error) {
	st := status{Instance: instance, Attached: []attached{}, Services: []serviceStatus{}, Reasons: map[string]datapath.Count{}}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	answer, err := control.NewClient(socket).Status(ctx)
	switch {
	case err != nil:
		st.Silent, st.elsewhere = err.Error(), errors.Is(err, control.ErrNoSocket)
	case answer.Instance != instance:
		st.Silent, st.elsewhere = fmt.Sprintf("the daemon at %s runs instance %q", socket, answer.Instance), true
	default:
		st.Daemon = &answer
	}
	dp, err := datapath.OpenReadOnly(datapath.Options{Instance: instance})
	if errors.Is(err, datapath.ErrNotLoaded) {
		return st, nil
	}
	if err != nil {
		return st, err
	}
	defer dp.Close() //nolint:errcheck // nothing was written
	st.Forwarding = true
	contents, err := dp.Contents()
	if err != nil {
		return st, err
	}
	counters, err := dp.Counters()
	if err != nil {
		return st, err
	}
	age, _, err := dp.HeartbeatAge()
	if err != nil {
		return st, err
	}
	st.Heartbeat = age.Seconds()
	attachments, err := dp.Attachments()
	if err != nil {
		return st, err
	}
	for _, a := range attachments {
		st.Attached = append(st.Attached, attached{Interface: a.Interface, Mode: string(a.Mode)})
	}
	for name, c := range counters.Reasons {
		if c.Packets > 0 {
			st.Reasons[name] = c
		}
	}
	st.Services = servicesOf(contents, counters)
	st.traffic = map[string]datapath.Traffic{}
	for index, b := range contents.Backends {
		st.traffic[b.BackendAddress.String()] = counters.Backends[index]
	}
	return st, nil
}

// servicesOf puts the records of a service together: it has one per address family.
func servicesOf(contents reconcile.Contents, counters datapath.Counters) []serviceStatus {
	byName := map[string]*serviceStatus{}
	for _, index := range slices.Sorted(maps.Keys(contents.Services)) {
		record := contents.Services[index]
		service := byName[record.Name]
		if service == nil {
			service = &serviceStatus{Name: record.Name, Forwarding: string(record.Forwarding), Frontends: []string{}, Backends: []backendStatus{}}
			byName[record.Name] = service
		}
		service.Add(counters.Services[index])
		for frontend, i := range contents.Frontends {
			if i == index && frontend.Configured() {
				service.Frontends = append(service.Frontends, frontend.String())
			}
		}
		slots := map[uint32]int{}
		for _, slot := range contents.Slots[index] {
			slots[slot.Current.Index]++
			if slot.State == reconcile.Transition {
				slots[slot.Previous.Index] += 0 // it is shown as long as flows may be there
			}
		}
		delete(slots, 0)
		for _, i := range slices.Sorted(maps.Keys(slots)) {
			b := backendStatus{Address: contents.Backends[i].BackendAddress.String(), Slots: slots[i],
				Share:    float64(slots[i]) / float64(len(contents.Slots[index])),
				Draining: contents.Backends[i].Draining}
			b.Add(counters.Backends[i])
			service.Backends = append(service.Backends, b)
		}
	}
	var services []serviceStatus
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		slices.Sort(byName[name].Frontends)
		services = append(services, *byName[name])
	}
	return nonNil(services)
}

func printStatus(w io.Writer, st status) {
	switch {
	case !st.Forwarding:
		fmt.Fprintf(w, "Instance %q is not forwarding: no data plane is loaded. `shunt run` starts one.\n", st.Instance)
		return
	case st.Daemon != nil:
		fmt.Fprintf(w, "Forwarding. The daemon is process %d, running since %s, with %s.\n", st.Daemon.PID,
			st.Daemon.Since.Format(time.DateTime), st.Daemon.ConfigPath)
	case st.elsewhere && st.Heartbeat < heartbeatFresh:
		fmt.Fprintf(w, "Forwarding, and a daemon is alive, but this is not how to ask it: %s.\n", st.Silent)
	default:
		fmt.Fprintf(w, "Still forwarding %s, but without a daemon: %s.\n", counted(len(st.Services), "service"), st.Silent)
		fmt.Fprintf(w, "The daemon's last sign of life was %.0f s ago. `shunt run` takes over; `shunt detach` ends forwarding.\n", st.Heartbeat)
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "\nINTERFACE\tMODE")
	for _, a := range st.Attached {
		fmt.Fprintf(t, "%s\t%s\n", a.Interface, a.Mode)
	}
	fmt.Fprintln(t, "\nSERVICE\tBACKEND\tSLOTS\tSHARE\tFLOWS\tPACKETS IN\tBYTES IN\tPACKETS OUT\tBYTES OUT")
	for _, s := range st.Services {
		fmt.Fprintf(t, "%s (%s)\t\t\t\t%s\n", s.Name, s.Forwarding, columns(s.Traffic))
		for _, b := range s.Backends {
			fmt.Fprintf(t, "\t%s\t%d\t%.1f %%\t%s\n", b.Address, b.Slots, 100*b.Share, columns(b.Traffic))
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

func columns(t datapath.Traffic) string {
	return fmt.Sprintf("%d\t%d\t%d\t%d\t%d", t.FlowsCreated, t.PacketsIn, t.BytesIn, t.PacketsOut, t.BytesOut)
}

func printConditions(w io.Writer, st status) {
	if st.Daemon == nil {
		return
	}
	if len(st.Daemon.Conditions) == 0 {
		fmt.Fprintln(w, "\nNothing is wrong that shunt knows of.")
		return
	}
	fmt.Fprintln(w, "\nCONDITIONS")
	for _, c := range st.Daemon.Conditions {
		fmt.Fprintf(w, "%s: %s (%s): %s\n  since %s; %s\n", c.Severity, c.Code, c.Subject, c.Text, c.Since.Format(time.DateTime), c.Remedy)
	}
}
