package command

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/cli/tool"
	"github.com/shunt-lb/shunt/internal/diag/top"
)

func newDiagTop(s cli.Streams) *cobra.Command {
	var o top.Options
	var memory bool
	var output, btf string
	var maxCPU percent
	var log diagLog
	c := &cobra.Command{
		Use:   "top",
		Short: "Show the results of io, runq, irqoff and memleak on one screen (needs root)",
		Long: `Show disks, IO by process and file, waits for CPUs, delays of CPUs, and growing memory of the kernel, on
a screen of 80 columns and 24 lines that is redrawn until Ctrl-C, which prints a summary. Without a
terminal, or with --once, the command prints one screen; with -o json it prints one object a line.

The last lines say what the sensors do not see. Each part has a command of its own with more detail: shunt
diag io, runq, irqoff and memleak. With --memory one address in 64 of the kernel's memory is watched, so
growth is an estimate, and shows after at least 8 intervals.`,
		Example: `  sudo shunt diag top --memory                      # find what is slow on this machine, and what grows
  sudo shunt diag top -i 10s --duration 1h -o json  # an object every ten seconds, for an hour`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := completeTop(o, output); err != nil {
				return err
			}
			if log.path != "" && output != "json" {
				return cli.UsageError{Err: errors.New("--log needs -o json, because it cannot log screens: give -o json, too")}
			}
			types, err := tool.FindTypes(btf)
			if err != nil {
				return err
			}
			o.BTF, o.MaxCPU = types, float64(maxCPU)
			o.Waits = func(sentence string) { fmt.Fprintf(s.Err, "shunt diag top: %s\n", sentence) }
			if memory {
				o.Sample = topSample
			}
			ctx, cancel := tool.Context(c.Context())
			defer cancel()
			return log.write(c, s.Out, func(out io.Writer) error { return top.Run(ctx, o, output == "json", out) })
		},
	}
	f := c.Flags()
	f.DurationVarP(&o.Interval, "interval", "i", 2*time.Second, "time that each screen covers")
	f.DurationVar(&o.Duration, "duration", 0, "end after this time, for example 5m; default: at Ctrl-C")
	f.DurationVarP(&o.Threshold, "threshold", "t", 10*time.Millisecond, "show tasks and CPUs that are late by more than this")
	f.BoolVar(&memory, "memory", false, "also watch the kernel's memory, which costs more than everything else")
	maxCPUFlag(c, &maxCPU)
	log.flags(c)
	f.BoolVar(&o.Once, "once", false, "end after one screen")
	tool.BTFFlag(c, &btf)
	cli.OutputFlag(c, &output)
	return c
}

// topSample is the N of the sample 1/N in which memory is watched.
const topSample = 64

// topThresholdMax is the longest threshold: windows of a timer of two fifths of it are examined.
const topThresholdMax = 10 * time.Second

func completeTop(o top.Options, output string) error {
	switch {
	case o.Interval < intervalLeast:
		return cli.UsageError{Err: fmt.Errorf("--interval must be at least %v, not %v", intervalLeast, o.Interval)}
	case o.Duration < 0:
		return cli.UsageError{Err: errors.New("--duration cannot be negative")}
	case o.Threshold < time.Millisecond || o.Threshold > topThresholdMax:
		return cli.UsageError{Err: fmt.Errorf("--threshold must be from 1ms to %v, not %v", topThresholdMax, o.Threshold)}
	}
	return cli.RequireOutput(output)
}
