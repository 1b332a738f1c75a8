package command

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/cli/tool"
	"github.com/shunt-lb/shunt/internal/diag/memleak"
)

func newDiagMemleak(s cli.Streams) *cobra.Command {
	var o memleak.Options
	var v memleak.View
	var output, btf string
	var maxCPU percent
	var log diagLog
	c := &cobra.Command{
		Use:   "memleak",
		Short: "Show memory of the kernel, or of a process, that keeps growing, and the code that allocates it (needs root)",
		Long: `Show live allocations of the kernel (kmalloc, slab caches by name, pages, vmalloc, memory of each CPU) by
the code that allocated them, at each interval, until Ctrl-C, which prints a summary. STATE says how a row develops:

  growing      the number of allocations older than two intervals has grown over several intervals
  unsure       the same, but frees that the command did not see may explain all of the growth
  reclaimable  the same, but the kernel takes this memory back when memory is short
  early        too few intervals have passed to tell: at least 8 are needed
  steady       the number does not grow, or by fewer than 16

Rows are sorted by STATE, then by growth, then by age. Memory that was allocated before the start is in no
row. Memory of user space and the page cache are not watched.

With --pid, the command watches that process's memory instead of the kernel's: calls of malloc, calloc,
realloc, posix_memalign, aligned_alloc and mmap in its C library. Each of these calls, and each free, then
takes about 10 us longer, so a process that allocates often becomes slow while it is watched.`,
		Example: `  sudo shunt diag memleak --interval 10s --duration 5m       # what grows, in five minutes
  sudo shunt diag memleak --sample 16 --max-cpu 3% --top 3   # on a busy machine: one address in 16, for at most 3 % of a CPU
  sudo shunt diag memleak --pid $(pidof app)                 # what a process allocates and does not free`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			o.MaxCPU = float64(maxCPU)
			if c.Flags().Changed("pid") {
				if err := checkProcess(o); err != nil {
					return err
				}
			}
			if err := completeMemleak(o, v, output); err != nil {
				return err
			}
			types, err := tool.FindTypes(btf)
			if err != nil {
				return err
			}
			o.BTF = types
			ctx, cancel := tool.Context(c.Context())
			defer cancel()
			return log.write(c, s.Out, func(out io.Writer) error { return memleak.Run(ctx, o, v, output == "json", out) })
		},
	}
	f := c.Flags()
	f.DurationVarP(&o.Interval, "interval", "i", 5*time.Second, "time between reports; growth is judged over 8 to 12 reports")
	f.DurationVar(&o.Duration, "duration", 0, "end after this time, for example 5m; default: at Ctrl-C")
	f.IntVar(&v.Top, "top", 10, "show at most this many rows; 0: all")
	f.BoolVar(&v.Addresses, "addresses", false, "show the address, size and age of each allocation, the 100 oldest of a row")
	f.StringVar(&o.Cgroup, "cgroup", "", "watch allocations by tasks in this cgroup only: a folder of the second hierarchy")
	f.Uint32Var(&o.Sample, "sample", 1, "watch one address in this many, a power of 2, and estimate the rest")
	f.Uint32Var(&o.Table, "table", memleak.TableSize, "room for this many live allocations, about 130 bytes each")
	maxCPUFlag(c, &maxCPU)
	log.flags(c)
	f.IntVarP(&o.PID, "pid", "p", 0, "watch the memory of this process instead of the kernel's")
	tool.BTFFlag(c, &btf)
	cli.OutputFlag(c, &output)
	return c
}

// checkProcess refuses options that have no meaning for one process.
func checkProcess(o memleak.Options) error {
	switch {
	case o.PID <= 0:
		return cli.UsageError{Err: fmt.Errorf("--pid is the number of a process, not %d", o.PID)}
	case o.Cgroup != "":
		return cli.UsageError{Err: errors.New("--cgroup cannot be used with --pid, because a process is in one cgroup")}
	case o.MaxCPU != 0:
		return cli.UsageError{Err: errors.New("--max-cpu cannot be used with --pid: most of a call's cost is its entry into the kernel, which a smaller sample does not save. End the command if the cost is too high")}
	}
	return nil
}

// intervalLeast is the shortest interval: the table is read once in it.
const intervalLeast = 100 * time.Millisecond

func completeMemleak(o memleak.Options, v memleak.View, output string) error {
	switch {
	case o.Interval < intervalLeast:
		return cli.UsageError{Err: fmt.Errorf("--interval must be at least %v, not %v", intervalLeast, o.Interval)}
	case o.Duration < 0 || v.Top < 0:
		return cli.UsageError{Err: errors.New("--duration and --top cannot be negative")}
	case bits.OnesCount32(o.Sample) != 1 || o.Sample > memleak.SampleMax:
		return cli.UsageError{Err: fmt.Errorf("--sample must be a power of 2, at most %d, not %d", memleak.SampleMax, o.Sample)}
	case o.Table == 0 || o.Table > 1<<24:
		return cli.UsageError{Err: fmt.Errorf("--table must be from 1 to %d, not %d", 1<<24, o.Table)}
	}
	return cli.RequireOutput(output)
}
