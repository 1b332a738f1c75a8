package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/status"
)

func newBackend(s cli.Streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "backend",
		Short: "List backends; drain a backend, change its weight, or set it up or down",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return cli.UsageError{Err: fmt.Errorf("there is no command `backend %s`; there are list, drain, undrain, weight and health", args[0])}
			}
			return c.Help()
		},
	}
	c.AddCommand(newBackendList(s), newBackendDrain(s), newBackendUndrain(s), newBackendWeight(s), newBackendHealth(s))
	return c
}

func newBackendList(s cli.Streams) *cobra.Command {
	var o reading
	c := &cobra.Command{
		Use:   "list",
		Short: "List every backend: its services, slots, counters, overrides, and whether it is up",
		Args:  cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			st, _, err := o.status(c)
			if err != nil {
				return err
			}
			if !st.Forwarding {
				return fmt.Errorf("list the backends of instance %q: no data plane is loaded; `shunt run` starts one", o.Instance)
			}
			if o.output == "json" {
				return cli.WriteMessages(s.Out, st.Backends)
			}
			printBackends(s.Out, st.Backends, st.GetDaemon().GetConditions(), rows{all: o.all})
			if st.Daemon == nil {
				fmt.Fprintf(s.Out, "Overrides and health are not shown, and neither are the services of backends without slots: %s.\n", st.DaemonError)
			}
			return nil
		},
	}
	o.flags(c)
	return c
}

// overrideText is "drain until 2026-01-02 15:04:05, set by root with shunt at …". The state is
// that of its backend, or "".
func overrideText(o *shuntv1.Override, backend string) string {
	text := o.Kind + " " + overrideValue(o)
	if backend == status.StateOut && o.Deadline != nil {
		text += ", when shunt gave up its flows (`shunt backend undrain` ends the drain)"
	}
	return text + ", set by " + authorText(o) + " at " + o.Since.AsTime().Local().Format(time.DateTime)
}

// healthText describes a backend's health in a service: it is empty if the health is up and the last check
// succeeded.
func healthText(h *shuntv1.BackendHealth) string {
	waiting, down := h.State == string(model.HealthWaiting), h.State == string(model.HealthDown)
	since := "since before the daemon started"
	if h.Since != nil {
		since = "since " + h.Since.AsTime().Local().Format(time.DateTime)
	}
	adopted := ""
	if h.Adopted {
		adopted = ", as the daemon found it at start: no check has ended yet"
	}
	switch {
	case h.Override == string(model.HealthDown):
		return "is down in " + h.Service + ", because an operator says so"
	case h.Override != "" && h.LastError != "":
		return fmt.Sprintf("counts as up in %s, because an operator says so; its last check failed: %s", h.Service, h.LastError)
	case h.Override != "":
		return ""
	case waiting && h.LastError == "":
		return "waits in " + h.Service + " for its first successful check"
	case waiting:
		return "waits in " + h.Service + " for its first successful check: " + h.LastError
	case down && h.KeptDownUntil != nil:
		return fmt.Sprintf("is down in %s %s, and stays down until %s because it goes down too often: %s", h.Service, since, h.KeptDownUntil.AsTime().Local().Format(time.TimeOnly), h.LastError)
	case down && h.LastError != "":
		return fmt.Sprintf("is down in %s %s: %s", h.Service, since, h.LastError)
	case down:
		return fmt.Sprintf("is down in %s %s%s", h.Service, since, adopted)
	case h.LastError != "":
		return fmt.Sprintf("is up in %s %s, but its last check failed: %s", h.Service, since, h.LastError)
	case h.Adopted:
		return "is up in " + h.Service + adopted
	}
	return ""
}

// drainOptions are the flags of `backend drain`.
type drainOptions struct {
	cli.Target
	deadline, idle time.Duration
	wait           bool
}

func newBackendDrain(s cli.Streams) *cobra.Command {
	var o drainOptions
	c := &cobra.Command{
		Use:   "drain BACKEND",
		Short: "Give a backend no new flows, in all its services; existing flows go on",
		Long: `Give a backend no new flows, in every service that has it. Its existing flows go on until they
end, or until --deadline. After the deadline, shunt treats the backend as if it were not
configured. The drain survives reloads and restarts. It ends with ` + "`shunt backend undrain`" + `, or
when the backend leaves the configuration. BACKEND is its name, ADDRESS or ADDRESS:PORT.

A service with direct return and tracking: none does not remember flows. Its flows go to other
backends at once, and these backends reset TCP connections. With tracking: auto, or with
affinity, UDP flows go to other backends at once. The command names these services.

--wait returns when no packet has reached the backend for --idle (exit code 0), or at the
deadline if packets still reach it (exit code 3). It does not see flows that have gone to other
backends. It does not wait for a connection that is silent for longer than --idle.`,
		Args: oneBackend,
		RunE: func(c *cobra.Command, args []string) error {
			if err := errors.Join(o.Target.Check(), o.check(c.Flags().Changed("idle"))); err != nil {
				return err
			}
			if o.wait {
				if os.Geteuid() != 0 {
					return errors.New("`shunt backend drain --wait` reads the kernel's counters, which needs root: run it with sudo, or without --wait")
				}
			}
			ctx, cancel := cli.UntilStopped(c.Context())
			defer cancel()
			request := &shuntv1.DrainBackendRequest{Backend: args[0]}
			if o.deadline > 0 {
				request.Deadline = durationpb.New(o.deadline)
			}
			if o.wait && o.Asked(c) == "" { // the counters are the instance's
				st, err := o.Client(c).Status(ctx)
				if err != nil {
					return err
				}
				o.Instance = st.Instance
			}
			result, err := o.Client(c).Drain(ctx, request)
			if err != nil {
				return err
			}
			printOverridden(s, result, "no new flows from now on; existing ones go on"+o.until())
			printUntracked(s, result, args[0])
			if !o.wait {
				return nil
			}
			return waitIdle(ctx, s, o, result)
		},
	}
	o.Flags(c)
	c.Flags().DurationVar(&o.deadline, "deadline", 0, "time from now after which shunt gives up existing flows; 0: never")
	c.Flags().BoolVar(&o.wait, "wait", false, "return when the backend is idle, or at the deadline")
	c.Flags().DurationVar(&o.idle, "idle", 30*time.Second, "with --wait: time without a packet after which the backend is idle")
	return c
}

// check refuses contradictory flags; idle reports whether that flag was given.
func (o drainOptions) check(idle bool) error {
	switch {
	case idle && !o.wait:
		return cli.UsageError{Err: errors.New("--idle is the time without a packet that --wait waits for; without --wait it has no effect")}
	case o.deadline < 0:
		return cli.UsageError{Err: fmt.Errorf("--deadline %s is in the past", o.deadline)}
	case o.idle < time.Second:
		return cli.UsageError{Err: fmt.Errorf("--idle %s is too short: at least 1s", o.idle)}
	case o.wait && o.deadline > 0 && o.deadline < o.idle:
		return cli.UsageError{Err: fmt.Errorf("--deadline %s ends before the backend can have been idle for %s; choose a shorter --idle", o.deadline, o.idle)}
	}
	return nil
}

// until returns the time at which existing flows are given up, in words.
func (o drainOptions) until() string {
	if o.deadline == 0 {
		return ", without a deadline"
	}
	return " for " + o.deadline.String()
}

func newBackendUndrain(s cli.Streams) *cobra.Command {
	return overriding(s, &cobra.Command{
		Use:   "undrain BACKEND",
		Short: "End the drain of a backend",
		Args:  oneBackend,
	}, func(ctx context.Context, c *control.Client, args []string) (*shuntv1.OverrideResponse, string, error) {
		result, err := c.Undrain(ctx, &shuntv1.UndrainBackendRequest{Backend: args[0]})
		return result, "not drained any more", err
	})
}

func newBackendWeight(s cli.Streams) *cobra.Command {
	return overriding(s, &cobra.Command{
		Use:   "weight BACKEND WEIGHT",
		Short: "Give a backend another weight than the file's, in all its services",
		Long: `Give a backend another weight than the file does, in every service that has it. WEIGHT is 0 to
65535, and 0 means no new flows. The weight survives reloads and restarts. It ends with
` + "`shunt override clear BACKEND weight`" + `, or when the backend leaves the configuration. BACKEND is
its name, ADDRESS or ADDRESS:PORT.`,
		Args: twoWords("a backend and its weight, as in `shunt backend weight 10.0.0.2 5`"),
	}, func(ctx context.Context, c *control.Client, args []string) (*shuntv1.OverrideResponse, string, error) {
		weight, err := strconv.ParseUint(args[1], 10, 32)
		if err != nil {
			return nil, "", cli.UsageError{Err: fmt.Errorf("weight %q is not a number from 0 to 65535", args[1])}
		}
		result, err := c.SetWeight(ctx, &shuntv1.SetBackendWeightRequest{Backend: args[0], Weight: proto.Uint32(uint32(weight))})
		return result, fmt.Sprintf("weight %d from now on, whatever the file says; `shunt override clear %s weight` ends it", weight, args[0]), err
	})
}

func newBackendHealth(s cli.Streams) *cobra.Command {
	return overriding(s, &cobra.Command{
		Use:   "health BACKEND up|down|auto",
		Short: "Set a backend up or down, whatever its checks find",
		Long: `Set a backend down or up, in every service that has it, whatever shunt finds out about it. auto
ends that. A backend that is down gets no new flows, its UDP flows go to other backends, and its
established connections stay. Without health checks every backend counts as up, so to set it up
changes nothing. The setting survives reloads and restarts. It ends when the backend leaves the
configuration. BACKEND is its name, ADDRESS or ADDRESS:PORT.`,
		Args: twoWords("a backend and up, down or auto, as in `shunt backend health 10.0.0.2 down`"),
	}, func(ctx context.Context, c *control.Client, args []string) (*shuntv1.OverrideResponse, string, error) {
		done := map[string]string{"up": "up from now on", "down": "down from now on: no new flows", "auto": "the health override has ended"}[args[1]]
		if done == "" {
			return nil, "", cli.UsageError{Err: fmt.Errorf("health %q is none of up, down and auto", args[1])}
		}
		result, err := c.SetHealth(ctx, &shuntv1.SetBackendHealthRequest{Backend: args[0], Health: args[1]})
		return result, done, err
	})
}

// overriding completes a command that changes overrides, and prints the result.
func overriding(s cli.Streams, c *cobra.Command, change func(context.Context, *control.Client, []string) (*shuntv1.OverrideResponse, string, error)) *cobra.Command {
	var t cli.Target
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := t.Check(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
		defer cancel()
		result, done, err := change(ctx, t.Client(c), args)
		if err != nil {
			return err
		}
		printOverridden(s, result, done)
		return nil
	}
	t.Flags(c)
	return c
}

// printOverridden prints the new state, and its effects.
func printOverridden(s cli.Streams, result *shuntv1.OverrideResponse, done string) {
	fmt.Fprintf(s.Out, "%s: %s.\n%s\n", strings.Join(result.Backends, ", "), done, result.Text)
	if result.Unsaved != "" {
		fmt.Fprintf(s.Err, "shunt: this is in force, but would not survive a restart of the daemon: %s; the daemon tries to save it again every second\n", result.Unsaved)
	}
}

// printUntracked names the existing flows that do not continue although the backend drains, and the remedy.
func printUntracked(s cli.Streams, result *shuntv1.OverrideResponse, backend string) {
	if len(result.Untracked) > 0 {
		fmt.Fprintf(s.Err, `shunt: existing flows do not go on, because tracking: none does not remember flows (%s): the flows of this backend,
and a few flows whose slots move too, go to other backends from now on, and these reset TCP connections. To keep
connections that are not reset yet, run shunt backend undrain %s. To let flows end by themselves, set tracking: auto in the
file, reload, and then drain.
`, strings.Join(result.Untracked, ", "), backend)
	}
	if len(result.UntrackedUdp) > 0 {
		fmt.Fprintf(s.Err, `shunt: existing UDP flows of direct return (%s) do not go on: they go to other backends from now on. They stay
only with tracking: always and without affinity.
`, strings.Join(result.UntrackedUdp, ", "))
	}
}

func twoWords(what string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 2 {
			return cli.UsageError{Err: errors.New("name " + what + "; `shunt backend list` shows backends")}
		}
		return nil
	}
}

func oneBackend(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return cli.UsageError{Err: errors.New("name one backend: its name, ADDRESS or ADDRESS:PORT; `shunt backend list` shows them")}
	}
	return nil
}

// waitIdle returns when none of the backends has had a packet for the idle time.
func waitIdle(ctx context.Context, s cli.Streams, o drainOptions, drained *shuntv1.OverrideResponse) error {
	const look = 200 * time.Millisecond
	backends := drained.Backends
	dp, err := datapath.OpenReadOnly(store.Options{Instance: o.Instance})
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
			fmt.Fprintf(s.Out, "No packet has reached %s for %s: drained.\n", strings.Join(backends, ", "), o.idle)
			if lost := drained.Untracked; len(lost) > 0 {
				fmt.Fprintf(s.Err, "shunt: the command did not wait for flows with tracking: none (%s), because they had gone to other backends\n", strings.Join(lost, ", "))
			}
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("interrupted while waiting; %s stays drained, `shunt backend undrain` ends the drain", strings.Join(backends, ", "))
		case <-deadline:
			fmt.Fprintf(s.Err, "shunt: at the deadline packets still reached %s, the last packet %.1f s ago; shunt gives up its flows now\n",
				strings.Join(backends, ", "), time.Since(since).Seconds())
			return cli.ErrStillBusy
		case <-tick.C:
		}
	}
}

// packetsTo returns how many packets from clients have been sent to the backends.
func packetsTo(dp *store.View, backends []string) (uint64, error) {
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
