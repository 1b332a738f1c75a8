package cli

import (
	"errors"
	"fmt"
	"io"
	"math/bits"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/diag/memleak"
)

func newDiagMemleak(s streams) *cobra.Command {
	var o memleak.Options
	var v memleak.View
	var output, btf string
	var maxCPU percent
	var log diagLog
	c := &cobra.Command{
		Use:   "memleak",
		Short: "Show which memory of the kernel, or of a process, becomes more and more, and who allocates it (needs root)",
		Long: `Show live allocations of the kernel (kmalloc, slab caches by name, pages, vmalloc, memory of each CPU) by
who allocated them, each interval, until Ctrl-C, which prints a summary. STATE says what becomes of them:

  growing      those older than two intervals became more and more, over several intervals
  unsure       the same, but frees that the command did not see may be all of it
  reclaimable  the same, but the kernel takes this memory back when it is short of it
  early        too few intervals have passed to tell: at least 8 are needed
  steady       they do not grow, or by fewer than 16

Rows are in the order of STATE, then of growth, then of age. What was allocated before the start is nobody's
leak. Memory of user space and the page cache are not watched.

With --pid, the memory of that process is watched in the place of the kernel's: what it gets from malloc,
calloc, realloc, posix_memalign, aligned_alloc and mmap of its C library. Each call of these, and of free,
then takes some 10 us longer, so a process that allocates much becomes slow while it is watched.`,
		Example: `  sudo shunt diag memleak --interval 10s --duration 5m       # what grows, in five minutes
  sudo shunt diag memleak --sample 16 --max-cpu 3% --top 3   # on a busy machine: one address of 16, for at most 3 % of a CPU
  sudo shunt diag memleak --pid $(pidof app)                 # what a process allocates and does not free`,
		Args: noArguments,
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
			types, err := findTypes(btf)
			if err != nil {
				return err
			}
			o.BTF = types
			ctx, cancel := toolContext(c.Context())
			defer cancel()
			return log.write(c, s.out, func(out io.Writer) error { return memleak.Run(ctx, o, v, output == "json", out) })
		},
	}
	f := c.Flags()
	f.DurationVarP(&o.Interval, "interval", "i", 5*time.Second, "time between reports; growth is looked at over 8 to 12 of them")
	f.DurationVar(&o.Duration, "duration", 0, "end after this time, as 5m; default: at Ctrl-C")
	f.IntVar(&v.Top, "top", 10, "show so many rows; 0: all")
	f.BoolVar(&v.Addresses, "addresses", false, "show the address, size and age of each allocation, the 100 oldest of a row")
	f.StringVar(&o.Cgroup, "cgroup", "", "watch allocations by tasks in this cgroup only: a folder of the second hierarchy")
	f.Uint32Var(&o.Sample, "sample", 1, "watch one address of so many, a power of 2, and estimate the rest")
	f.Uint32Var(&o.Table, "table", memleak.TableSize, "room for so many live allocations, some 130 bytes each")
	maxCPUFlag(c, &maxCPU)
	log.flags(c)
	f.IntVarP(&o.PID, "pid", "p", 0, "watch the memory of this process, and not the kernel's")
	btfFlag(c, &btf)
	outputFlag(c, &output)
	return c
}

// checkProcess refuses what has no meaning for one process.
func checkProcess(o memleak.Options) error {
	switch {
	case o.PID <= 0:
		return usageError{fmt.Errorf("--pid %d: the number of a process", o.PID)}
	case o.Cgroup != "":
		return usageError{errors.New("--cgroup does not go with --pid: a process is in one cgroup")}
	case o.MaxCPU != 0:
		return usageError{errors.New("--max-cpu does not go with --pid: most of what a call costs is the way into the kernel, which a smaller sample does not save. End the command where that is too much")}
	}
	return nil
}

// intervalLeast is the shortest: the table is read once in it.
const intervalLeast = 100 * time.Millisecond

func completeMemleak(o memleak.Options, v memleak.View, output string) error {
	switch {
	case o.Interval < intervalLeast:
		return usageError{fmt.Errorf("--interval %v: at least %v", o.Interval, intervalLeast)}
	case o.Duration < 0 || v.Top < 0:
		return usageError{errors.New("--duration and --top cannot be negative")}
	case bits.OnesCount32(o.Sample) != 1 || o.Sample > memleak.SampleMax:
		return usageError{fmt.Errorf("--sample %d: a power of 2, at most %d", o.Sample, memleak.SampleMax)}
	case o.Table == 0 || o.Table > 1<<24:
		return usageError{fmt.Errorf("--table %d: from 1 to %d", o.Table, 1<<24)}
	}
	return requireOutput(output)
}
