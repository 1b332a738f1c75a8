package command

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/cli/tool"
	"github.com/shunt-lb/shunt/internal/diag/sched"
)

func newDiagRunq(s cli.Streams) *cobra.Command {
	var o sched.Options
	var top int
	var output, btf string
	var maxCPU percent
	var log diagLog
	c := &cobra.Command{
		Use:   "runq",
		Short: "Show how long tasks wait for a CPU, and behind whom (needs root)",
		Long: `Show each wait of a task for a CPU that is longer than the threshold, and the tasks that ran on that
CPU meanwhile, until Ctrl-C. The summary then says for each CPU how long tasks waited and how many tasks it had
to run, and for each task how long its wake-ups took.

A task waits from the moment that it can run, because it was woken or taken off a CPU, until it runs.
With --pid and --cgroup only the waits of these tasks are measured; any task may be shown as running
meanwhile.`,
		Example: `  sudo shunt diag runq --pid 1234                    # this process waits: how long, and behind whom?
  sudo shunt diag runq --threshold 5ms --duration 1m # who waits more than 5 ms, for a minute, then a summary`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if o.Threshold <= 0 || o.Duration < 0 || top < 0 {
				return cli.UsageError{Err: errors.New("--threshold must be more than 0, and --duration and --top cannot be negative")}
			}
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			types, err := tool.FindTypes(btf)
			if err != nil {
				return err
			}
			o.BTF, o.MaxCPU = types, float64(maxCPU)
			ctx, cancel := tool.Context(c.Context())
			defer cancel()
			return log.write(c, s.Out, func(out io.Writer) error { return sched.RunQueues(ctx, o, top, output == "json", out) })
		},
	}
	f := c.Flags()
	f.Uint32VarP(&o.PID, "pid", "p", 0, "measure waits of this process only")
	f.StringVar(&o.Cgroup, "cgroup", "", "measure waits of tasks in this cgroup only: a folder of the second hierarchy")
	f.DurationVarP(&o.Threshold, "threshold", "t", 10*time.Millisecond, "show each wait that is longer")
	f.DurationVar(&o.Duration, "duration", 0, "end after this time, for example 5m; default: at Ctrl-C")
	f.IntVar(&top, "top", 20, "number of tasks in the summary; 0: all")
	maxCPUFlag(c, &maxCPU)
	log.flags(c)
	tool.BTFFlag(c, &btf)
	cli.OutputFlag(c, &output)
	return c
}

func newDiagIrqoff(s cli.Streams) *cobra.Command {
	var threshold uint32
	var file, output, btf string
	var maxCPU percent
	var log diagLog
	c := &cobra.Command{
		Use:   "irqoff [DURATION]",
		Short: "Show why a CPU or a task was late: interrupts off, softirqs, steal, others (needs root)",
		Long: `Show each delay of a CPU or a task above the threshold, until Ctrl-C or for DURATION, which is a number
of seconds or a time such as 5m. KIND names the cause:

  irqoff   interrupts were off; the stack begins where they were switched on again
  softirq  a softirq took long
  preempt  kernel code did not yield to a task that waited
  steal    the virtual CPU did not run: the hypervisor ran something else, as far as the machine can see
  wait     a task waited for a CPU behind others, and the row names them

The line "floor" says which delays are found for certain, and which cannot be found.`,
		Example: `  sudo shunt diag irqoff 60             # delays of more than 10 ms, in a minute
  sudo shunt diag irqoff -t 5 -f late.txt # delays of more than 5 ms, into a file, until Ctrl-C`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return cli.UsageError{Err: errors.New("give at most one DURATION")}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) (err error) {
			duration, err := irqoffDuration(args)
			if err != nil {
				return cli.UsageError{Err: err}
			}
			if threshold < 1 || threshold > 10_000 {
				return cli.UsageError{Err: fmt.Errorf("--threshold must be from 1 to 10000 ms, not %d", threshold)}
			}
			if file != "" && log.path != "" {
				return cli.UsageError{Err: errors.New("-f and --log both name a file for the output: give one of them")}
			}
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			types, err := tool.FindTypes(btf)
			if err != nil {
				return err
			}
			out := s.Out
			if file != "" {
				f, err := os.OpenFile(file, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
				if err != nil {
					return fmt.Errorf("open the file for the output: %w", err)
				}
				defer func() { err = errors.Join(err, f.Close()) }()
				out = f
			}
			ctx, cancel := tool.Context(c.Context())
			defer cancel()
			o := sched.Options{BTF: types, Threshold: time.Duration(threshold) * time.Millisecond, Duration: duration, MaxCPU: float64(maxCPU)}
			return log.write(c, out, func(out io.Writer) error { return sched.Stalls(ctx, o, output == "json", out) })
		},
	}
	f := c.Flags()
	f.Uint32VarP(&threshold, "threshold", "t", 10, "show delays of more than this many ms")
	f.StringVarP(&file, "file", "f", "", "write to this file instead of standard output; the file of --log is also renamed when it is full")
	maxCPUFlag(c, &maxCPU)
	log.flags(c)
	tool.BTFFlag(c, &btf)
	cli.OutputFlag(c, &output)
	return c
}

// irqoffDuration reads a number of seconds, or a time with its unit. 0: until Ctrl-C.
func irqoffDuration(args []string) (time.Duration, error) {
	if len(args) == 0 {
		return 0, nil
	}
	if seconds, err := strconv.ParseUint(args[0], 10, 31); err == nil && seconds > 0 {
		return time.Duration(seconds) * time.Second, nil
	}
	d, err := time.ParseDuration(args[0])
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("DURATION %q: write a number of seconds, or a time such as 5m", args[0])
	}
	return d, nil
}
