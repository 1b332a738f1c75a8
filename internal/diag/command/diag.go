package command

import (
	"encoding/json"
	"errors"
	"fmt"
	stdio "io"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/cli/tool"
	"github.com/shunt-lb/shunt/internal/diag"
	"github.com/shunt-lb/shunt/internal/diag/io"
	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/sensor"
)

func newDiag(s cli.Streams) *cobra.Command {
	c := cli.Group(&cobra.Command{
		Use:   "diag COMMAND",
		Short: "Find where an IO, a packet or a task lost its time (needs root)",
	})
	c.AddCommand(newDiagIO(s), newDiagPing(s), newDiagRunq(s), newDiagIrqoff(s), newDiagMemleak(s), newDiagVdisk(s), newDiagTop(s), newDiagDoctor(s))
	return c
}

// diagIOOptions are set by the command line.
type diagIOOptions struct {
	io.View
	inode           uint64
	cycle, timeout  int // seconds
	duration        time.Duration
	btf, output     string
	json, files, on bool
	sizes           bool
	maxCPU          percent
	log             diagLog
}

func newDiagIO(s cli.Streams) *cobra.Command {
	var o diagIOOptions
	c := &cobra.Command{
		Use:   "io",
		Short: "Show the IO of disks by process and file (needs root)",
		Long: `Show which process does IO with which file, and how busy the disks are, until Ctrl-C, which prints a
summary.

The command counts IO when it enters the block layer, so it does not show reads that the page cache
answers. It shows a write to the page cache when it is flushed, under the process that wrote. A name in
brackets is a process that only carried out the IO, for an unknown process: the line "unattributed" has
their sum. The first lines say how the sensors are attached, and which data are lost.`,
		Example: `  sudo shunt diag io -d vda -c 5          # IO of vda and its partitions, every five seconds
  sudo shunt diag io -t 10 --duration 1m  # the ten largest rows, for a minute, then a summary`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if o.sizes && c.Flags().Changed("fs") && o.files {
				return cli.UsageError{Err: errors.New("-P shows rows by process and disk, and -f shows rows by process and file: give one of them")}
			}
			if err := o.complete(); err != nil {
				return err
			}
			types, err := tool.FindTypes(o.btf)
			if err != nil {
				return err
			}
			ctx, cancel := tool.Context(c.Context())
			defer cancel()
			return o.log.write(c, s.Out, func(out stdio.Writer) error {
				return io.Run(ctx, io.Options{BTF: types, Inode: o.inode, Duration: o.duration, Sizes: o.sizes, MaxCPU: float64(o.maxCPU)}, o.View,
					time.Duration(o.cycle)*time.Second, o.output == "json", out)
			})
		},
	}
	f := c.Flags()
	f.IntVarP(&o.cycle, "cycle", "c", 1, "seconds between reports")
	f.IntVarP(&o.timeout, "timeout", "T", 0, "end after this many seconds; 0: at Ctrl-C")
	f.DurationVar(&o.duration, "duration", 0, "like --timeout, as a duration: for example 90s or 5m")
	f.IntVarP(&o.Top, "top", "t", 0, "show only this many rows, the largest; 0: all")
	f.Float64VarP(&o.Util, "util-threshold", "u", 0, "show only disks that are busy for at least this percentage of the time, and their IO")
	f.Float64VarP(&o.Bandwidth, "bandwidth-threshold", "b", 0, "show only rows with at least this many bytes per second")
	f.Float64VarP(&o.Rate, "iops-threshold", "i", 0, "show only rows with at least this many requests per second")
	f.StringVarP(&o.Device, "device", "d", "", "show only this disk and its partitions, or this partition")
	f.Uint32VarP(&o.PID, "pid", "p", 0, "show only this process")
	f.Uint64Var(&o.inode, "inode", 0, "watch only files with this inode number")
	f.BoolVarP(&o.files, "fs", "f", true, "show rows by process and file; -f=false: by process and disk")
	f.BoolVarP(&o.sizes, "pattern", "P", false, "show rows by process and disk, with the shares of writes by size")
	f.BoolVarP(&o.NoDisks, "nodisk", "n", false, "do not show the table of disks")
	f.BoolVarP(&o.on, "misc", "m", true, "charge flushes to the process that wrote; always on")
	f.BoolVarP(&o.json, "json", "j", false, "the same as -o json: one object a line")
	maxCPUFlag(c, &o.maxCPU)
	o.log.flags(c)
	tool.BTFFlag(c, &o.btf)
	cli.OutputFlag(c, &o.output)
	return c
}

func (o *diagIOOptions) complete() error {
	if o.json {
		o.output = "json"
	}
	switch {
	case o.cycle < 1:
		return cli.UsageError{Err: fmt.Errorf("--cycle must be at least 1 second, not %d", o.cycle)}
	case o.timeout < 0 || o.duration < 0:
		return cli.UsageError{Err: errors.New("--timeout and --duration cannot be negative")}
	case o.timeout > 0 && o.duration > 0:
		return cli.UsageError{Err: errors.New("--timeout and --duration mean the same: give one of them")}
	case o.Top < 0 || o.Util < 0 || o.Bandwidth < 0 || o.Rate < 0:
		return cli.UsageError{Err: errors.New("--top and thresholds cannot be negative")}
	case !o.on:
		return cli.UsageError{Err: errors.New("--misc=false is not possible: flushes are always charged to the process that wrote")}
	}
	if o.timeout > 0 {
		o.duration = time.Duration(o.timeout) * time.Second
	}
	o.ByDisk = !o.files || o.sizes
	return cli.RequireOutput(o.output)
}

func newDiagDoctor(s cli.Streams) *cobra.Command {
	var output, file string
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Show how each sensor of the tools attaches on this machine, and what it cannot see (needs root)",
		Long: `Attach each sensor in the best way that this kernel allows, and detach it again. The command prints
the way, what the sensor cannot see in that way, and why the kernel refused better ways. It exits with 1
if a tool cannot run.`,
		Example: `  sudo shunt diag doctor                                     # which data the tools can see on this machine, and how
  sudo shunt diag doctor --btf /etc/shunt/btf/$(uname -r).btf # on a kernel that does not describe its types`,
		Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			types, err := sensor.FindBTF(file, tool.Folders...)
			if err != nil {
				return fmt.Errorf("no tool can run: %w; name a file with --btf FILE", err)
			}
			return printDiagDoctor(s, types, diag.Examine(types), output)
		},
	}
	c.Flags().StringVar(&file, "btf", "", "file with the description of the kernel's types")
	cli.OutputFlag(c, &output)
	return c
}

// diagTool is a tool in `shunt diag doctor -o json`.
type diagTool struct {
	Tool    string        `json:"tool"`
	Runs    bool          `json:"runs"`
	Reason  string        `json:"reason,omitempty"` // why it does not
	Sensors []line.Sensor `json:"sensors"`
}

func printDiagDoctor(s cli.Streams, types sensor.BTF, tools []diag.Tool, output string) error {
	fails := false
	lines := []diagTool{}
	for _, t := range tools {
		if errors.Is(t.Err, sensor.ErrPrivilege) {
			return tool.Privileges(t.Err)
		}
		fails = fails || t.Err != nil
		line := diagTool{Tool: t.Name, Runs: t.Err == nil, Sensors: line.Sensors(t.Results)}
		if t.Err != nil {
			line.Reason = t.Err.Error()
		}
		lines = append(lines, line)
	}
	if output == "json" {
		err := json.NewEncoder(s.Out).Encode(struct {
			BTF   string     `json:"btf"`
			Tools []diagTool `json:"tools"`
		}{types.From, lines})
		if err != nil {
			return err
		}
	} else {
		fmt.Fprintf(s.Out, "types: %s\n", types.From)
		for _, t := range lines {
			printDiagTool(s, t)
		}
	}
	if fails {
		return cli.ErrSilent
	}
	return nil
}

func printDiagTool(s cli.Streams, t diagTool) {
	fmt.Fprintf(s.Out, "\n%s\n", t.Tool)
	for _, l := range t.Sensors {
		way, loses := l.Way, l.Loses
		if way == "" {
			way = "not attached"
		}
		if loses == "" {
			loses = "the best way"
		}
		fmt.Fprintf(s.Out, "  %s: %s\n    %s: %s\n", l.Sensor, l.Watches, way, loses)
		for _, r := range l.Refused {
			fmt.Fprintf(s.Out, "    refused: %s: %s\n", r.Way, r.Reason)
		}
	}
	if !t.Runs {
		fmt.Fprintf(s.Out, "  cannot run: %s\n", t.Reason)
	}
}
