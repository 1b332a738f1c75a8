package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/user"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/datapath"
	"github.com/spf13/cobra"
)

func newBackend(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "backend",
		Short: "List backends; drain one and take it back",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("there is no command `backend %s`; there are list, drain and undrain", args[0])}
			}
			return c.Help()
		},
	}
	c.AddCommand(newBackendList(s), newBackendDrain(s), newBackendUndrain(s))
	return c
}

// backendLine is one backend over all its services.
type backendLine struct {
	Address  string         `json:"address"`
	State    string         `json:"state"` // "active", "draining" (or weight 0), or "out" past its deadline
	Services []string       `json:"services"`
	Slots    int            `json:"slots"`
	Drain    *control.Drain `json:"drain,omitempty"`
	datapath.Traffic
}

func newBackendList(s streams) *cobra.Command {
	var instance, socket, output string
	c := &cobra.Command{
		Use:   "list",
		Short: "Every backend: its services, slots, counters, and whether it drains",
		Args:  noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := errors.Join(requireOutput(output), requireInstance(instance), requireRoot("backend list")); err != nil {
				return err
			}
			st, err := readStatus(c.Context(), instance, socket)
			if err != nil {
				return err
			}
			if !st.Forwarding {
				return fmt.Errorf("list the backends of instance %q: no data plane is loaded; `shunt run` starts one", instance)
			}
			lines := backendsOf(st)
			if output == "json" {
				return writeJSON(s.out, nonNil(lines))
			}
			printBackends(s.out, lines)
			if st.Daemon == nil {
				fmt.Fprintf(s.out, "Drains are not shown, nor backends without slots: %s.\n", st.Silent)
			}
			return nil
		},
	}
	instanceFlag(c, &instance)
	socketFlag(c, &socket)
	outputFlag(c, &output)
	return c
}

// backendsOf turns services of backends into backends of services.
func backendsOf(st status) []backendLine {
	byAddress := map[string]*backendLine{}
	for _, service := range st.Services {
		for _, b := range service.Backends {
			line := byAddress[b.Address]
			if line == nil {
				line = &backendLine{Address: b.Address, State: "active", Traffic: b.Traffic}
				byAddress[b.Address] = line
			}
			if !slices.Contains(line.Services, service.Name) {
				line.Services = append(line.Services, service.Name)
			}
			line.Slots += b.Slots
			if b.Draining {
				line.State = "draining"
			}
		}
	}
	if st.Daemon != nil {
		addClosed(byAddress, st)
	}
	var lines []backendLine
	for _, address := range slices.Sorted(maps.Keys(byAddress)) {
		lines = append(lines, *byAddress[address])
	}
	return lines
}

// addClosed adds what only the daemon knows: backends that no slot names any more.
func addClosed(byAddress map[string]*backendLine, st status) {
	for _, closed := range st.Daemon.Closed {
		line := byAddress[closed.Backend]
		if line == nil {
			line = &backendLine{Address: closed.Backend, State: "draining", Traffic: st.traffic[closed.Backend]}
			byAddress[closed.Backend] = line
		}
		line.Services = append(line.Services, closed.Services...)
		slices.Sort(line.Services)
		line.Services = slices.Compact(line.Services)
	}
	for _, drain := range st.Daemon.Drains {
		line := byAddress[drain.Backend]
		if line == nil {
			continue // it has just left the configuration
		}
		line.State, line.Drain = "draining", &drain
		if _, living := st.traffic[drain.Backend]; !living && !drain.Deadline.IsZero() && time.Now().After(drain.Deadline) {
			line.State = "out"
		}
	}
}

func printBackends(w io.Writer, lines []backendLine) {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "BACKEND\tSTATE\tSERVICES\tSLOTS\tFLOWS\tPACKETS IN\tBYTES IN\tPACKETS OUT\tBYTES OUT")
	for _, b := range lines {
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\n", b.Address, b.State, strings.Join(b.Services, ","), b.Slots, columns(b.Traffic))
	}
	_ = t.Flush()
	for _, b := range lines {
		if b.Drain != nil {
			fmt.Fprintf(w, "%s drains since %s, by %s%s.\n", b.Address, b.Drain.Since.Local().Format(time.DateTime), b.Drain.By, deadlineText(b))
		}
	}
}

func deadlineText(b backendLine) string {
	switch deadline := b.Drain.Deadline.Local().Format(time.DateTime); {
	case b.Drain.Deadline.IsZero():
		return ", without a deadline"
	case b.State == "out":
		return "; its flows were given up at " + deadline + ", and `shunt backend undrain` takes it back"
	default:
		return ", until " + deadline
	}
}

// drainOptions are the flags of `backend drain`.
type drainOptions struct {
	instance, socket string
	deadline, idle   time.Duration
	wait             bool
}

func newBackendDrain(s streams) *cobra.Command {
	var o drainOptions
	c := &cobra.Command{
		Use:   "drain BACKEND",
		Short: "No new flows for a backend, in all its services; existing ones go on",
		Long: `Gives a backend no new flows, in every service that has it. Flows that it has go on until
they end or until --deadline, after which the backend is treated as if it were not
configured. The drain survives reloads and restarts, and ends with ` + "`shunt backend undrain`" + `
or when the backend leaves the configuration. BACKEND is its name, ADDRESS or ADDRESS:PORT.

--wait returns once no packet has reached the backend for --idle (exit code 0), or at the
deadline if packets still do (exit code 3).`,
		Args: oneBackend,
		RunE: func(c *cobra.Command, args []string) error {
			if err := errors.Join(requireInstance(o.instance), o.check(c.Flags().Changed("idle"))); err != nil {
				return err
			}
			if o.wait {
				if err := requireRoot("backend drain --wait"); err != nil {
					return err
				}
			}
			ctx, cancel := untilStopped(c.Context())
			defer cancel()
			result, err := control.NewClient(o.socket).Drain(ctx, control.DrainRequest{Backend: args[0], Deadline: o.deadline, By: caller()})
			if err != nil {
				return err
			}
			if result.Refused != "" {
				return errors.New(result.Refused) // names the backend itself
			}
			fmt.Fprintf(s.out, "%s: no new flows from now on; existing ones go on%s.\n", strings.Join(result.Backends, ", "), o.until())
			if result.Difference.Empty() {
				result.Text = "It got none before, either; only the deadline is new."
			}
			fmt.Fprintln(s.out, result.Text)
			if !o.wait {
				return nil
			}
			return waitIdle(ctx, s, o, result.Backends)
		},
	}
	instanceFlag(c, &o.instance)
	socketFlag(c, &o.socket)
	c.Flags().DurationVar(&o.deadline, "deadline", 0, "when existing flows are given up, from now on; 0: never")
	c.Flags().BoolVar(&o.wait, "wait", false, "return when the backend is idle, or at the deadline")
	c.Flags().DurationVar(&o.idle, "idle", 30*time.Second, "with --wait: how long no packet must have reached the backend")
	return c
}

// check refuses what makes no sense together; idle is whether that flag was given.
func (o drainOptions) check(idle bool) error {
	switch {
	case idle && !o.wait:
		return usageError{errors.New("--idle is how long --wait waits for silence; without --wait it means nothing")}
	case o.deadline < 0:
		return usageError{fmt.Errorf("--deadline %s lies in the past", o.deadline)}
	case o.idle < time.Second:
		return usageError{fmt.Errorf("--idle %s is too short to mean anything: at least 1s", o.idle)}
	case o.wait && o.deadline > 0 && o.deadline < o.idle:
		return usageError{fmt.Errorf("--deadline %s comes before the backend can have been idle for %s; say a shorter --idle", o.deadline, o.idle)}
	}
	return nil
}

// until is when existing flows are given up, in words.
func (o drainOptions) until() string {
	if o.deadline == 0 {
		return ", without a deadline"
	}
	return " for " + o.deadline.String()
}

func newBackendUndrain(s streams) *cobra.Command {
	var socket string
	c := &cobra.Command{
		Use:   "undrain BACKEND",
		Short: "Take a drained backend back",
		Args:  oneBackend,
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
			defer cancel()
			result, err := control.NewClient(socket).Undrain(ctx, control.UndrainRequest{Backend: args[0]})
			if err != nil {
				return err
			}
			if result.Refused != "" {
				return errors.New(result.Refused)
			}
			fmt.Fprintf(s.out, "%s: gets new flows again.\n%s\n", strings.Join(result.Backends, ", "), result.Text)
			return nil
		},
	}
	socketFlag(c, &socket)
	return c
}

func oneBackend(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usageError{errors.New("name one backend: its name, ADDRESS or ADDRESS:PORT; `shunt backend list` shows them")}
	}
	return nil
}

// caller names who drains, for whoever finds the backend drained later.
func caller() string {
	if name := os.Getenv("SUDO_USER"); name != "" {
		return name
	}
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return "unknown"
}

// waitIdle returns when none of the backends has had a packet for the idle time.
func waitIdle(ctx context.Context, s streams, o drainOptions, backends []string) error {
	const look = 200 * time.Millisecond
	dp, err := datapath.OpenReadOnly(datapath.Options{Instance: o.instance})
	if err != nil {
		return fmt.Errorf("watch the counters of %s: %w", strings.Join(backends, ", "), err)
	}
	defer dp.Close() //nolint:errcheck // nothing was written
	var deadline <-chan time.Time
	if o.deadline > 0 {
		deadline = time.After(o.deadline)
	}
	tick := time.NewTicker(look)
	defer tick.Stop()
	last, since := uint64(0), time.Now()
	for first := true; ; first = false {
		packets, err := packetsTo(dp, backends)
		if err != nil {
			return err
		}
		if first || packets != last {
			last, since = packets, time.Now()
		}
		if time.Since(since) >= o.idle {
			fmt.Fprintf(s.out, "No packet has reached %s for %s: drained.\n", strings.Join(backends, ", "), o.idle)
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("interrupted while waiting; %s stays drained, `shunt backend undrain` takes it back", strings.Join(backends, ", "))
		case <-deadline:
			fmt.Fprintf(s.err, "shunt: at the deadline packets still reached %s, %.1f s ago the last; its flows are given up now\n",
				strings.Join(backends, ", "), time.Since(since).Seconds())
			return errStillBusy
		case <-tick.C:
		}
	}
}

// packetsTo is how many packets from clients have been sent to the backends.
func packetsTo(dp *datapath.View, backends []string) (uint64, error) {
	contents, err := dp.Contents()
	if err != nil {
		return 0, err
	}
	counters, err := dp.Counters()
	if err != nil {
		return 0, err
	}
	var packets uint64
	for index, record := range contents.Backends {
		if slices.Contains(backends, record.BackendAddress.String()) {
			packets += counters.Backends[index].PacketsIn
		}
	}
	return packets, nil
}
