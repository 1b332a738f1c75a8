package cli

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/diag/sched"
)

func newDiagRunq(s streams) *cobra.Command {
	var o sched.Options
	var duration time.Duration
	var top int
	var output, btf string
	c := &cobra.Command{
		Use:   "runq",
		Short: "Show how long tasks wait for a CPU, and behind whom (needs root)",
		Long: `Show waits of tasks for a CPU: each that is longer than the threshold with who ran on that CPU
meanwhile, until Ctrl-C, which prints for each CPU how long waits were and how many tasks it had to run,
and for each task how long its wake-ups took.

A task waits from the moment that it can run, because it was woken or taken off a CPU, until it runs.
With --pid and --cgroup only these tasks' waits are measured; who ran meanwhile may be anybody.`,
		Example: `  sudo shunt diag runq --pid 1234                    # this process waits: how long, and behind whom?
  sudo shunt diag runq --threshold 5ms --duration 1m # who waits more than 5 ms, for a minute, then a summary`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if o.Threshold <= 0 || duration < 0 || top < 0 {
				return usageError{errors.New("--threshold is more than 0, and --duration and --top cannot be negative")}
			}
			if err := requireOutput(output); err != nil {
				return err
			}
			types, err := findTypes(btf)
			if err != nil {
				return err
			}
			o.BTF = types
			ctx, cancel := toolContext(c.Context(), duration)
			defer cancel()
			return privileges(sched.RunQueues(ctx, o, top, output == "json", s.out))
		},
	}
	f := c.Flags()
	f.Uint32VarP(&o.PID, "pid", "p", 0, "measure waits of this process only")
	f.StringVar(&o.Cgroup, "cgroup", "", "measure waits of tasks in this cgroup only: a folder of the second hierarchy")
	f.DurationVarP(&o.Threshold, "threshold", "t", 10*time.Millisecond, "show each wait that is longer")
	f.DurationVar(&duration, "duration", 0, "end after this time, as 5m; default: at Ctrl-C")
	f.IntVar(&top, "top", 20, "so many tasks in the summary; 0: all")
	btfFlag(c, &btf)
	outputFlag(c, &output)
	return c
}
