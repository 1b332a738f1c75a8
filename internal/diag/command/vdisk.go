package command

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/cli/tool"
	"github.com/shunt-lb/shunt/internal/diag/vdisk"
)

func newDiagVdisk(s cli.Streams) *cobra.Command {
	c := cli.Group(&cobra.Command{
		Use:   "vdisk COMMAND",
		Short: "Follow the disk requests of a virtual machine through qemu and the host's kernel",
		Long: `Record the disk requests of a virtual machine (qemu), and report for each request of the guest where its
bytes are, in the image, in files and on the disk, and how long it was in each layer. If the guest's half
was recorded at the same time, the report also names the guest's file of each request.`,
		Example: `  sudo shunt diag vdisk record --pid 4711 --output vm.rec --duration 10s  # on the host
  sudo shunt diag vdisk record --guest --output guest.rec --duration 10s  # inside the guest, meanwhile
  shunt diag vdisk report vm.rec guest.rec                                # anywhere`,
	})
	c.AddCommand(newDiagVdiskRecord(s), newDiagVdiskReport(s))
	return c
}

func newDiagVdiskRecord(s cli.Streams) *cobra.Command {
	var o vdisk.Options
	var btf string
	var limit int64
	var probes []string
	var maxCPU percent
	c := &cobra.Command{
		Use:   "record {--pid PID | --guest} --output FILE",
		Short: "Record the disk requests of a virtual machine into a file (needs root)",
		Long: `Record what one qemu process does with its disks, until Ctrl-C, or until the process ends or the file is
full. At the end the command asks qemu-img where the disk is in its image, and the file system where the
image is on the disk, and writes that into the file too.

With --guest the command runs inside the virtual machine, and records its half: the requests of its file
systems to its disks, the file of each, and the time when its drivers have the answer. ` + "`report`" + ` joins both halves.

The file shows where the machine's data are, so only its owner can read it. The command does not overwrite a
file. The first lines say how the sensors are attached; without qemu's symbols some of them are missing.

--probe adds a point inside a layer: the beginning of a function of qemu (on the host) or of the kernel
(where it allows kprobes). The report divides the layer there. An unknown name is refused, with a list of
similar names. Probes that qemu's source defines itself (USDT) are not used; Debian's qemu has none.`,
		Example: `  sudo shunt diag vdisk record --pid $(pidof qemu-system-x86_64) --output vm.rec --duration 10s
  sudo shunt diag vdisk record --pid 4711 --output vm.rec --limit 512  # until Ctrl-C, at most 512 MiB
  sudo shunt diag vdisk record --guest --output guest.rec --duration 10s  # inside the guest
  sudo shunt diag vdisk record --pid 4711 --output vm.rec --probe qemu:throttle_group_co_io_limits_intercept`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			switch {
			case o.Guest && o.PID != 0:
				return cli.UsageError{Err: errors.New("--pid is for the host, and --guest is for use inside the virtual machine: give one of them")}
			case !o.Guest && o.PID <= 0:
				return cli.UsageError{Err: errors.New("--pid is missing: name the virtual machine's process, or give --guest inside the virtual machine")}
			case o.Path == "":
				return cli.UsageError{Err: errors.New("--output is missing: name the file for the recording")}
			case limit < 1 || limit > 1<<20:
				return cli.UsageError{Err: errors.New("--limit must be at least 1 and at most 1048576 MiB")}
			case o.Duration < 0:
				return cli.UsageError{Err: errors.New("--duration cannot be negative")}
			}
			for _, text := range probes {
				p, err := vdisk.ParseProbe(text)
				if err != nil {
					return cli.UsageError{Err: fmt.Errorf("--probe: %w", err)}
				}
				o.Probes = append(o.Probes, p)
			}
			o.Limit, o.MaxCPU = limit<<20, float64(maxCPU)
			var err error
			if o.BTF, err = tool.FindTypes(btf); err != nil {
				return err
			}
			ctx, cancel := tool.Context(c.Context())
			defer cancel()
			return tool.Privileges(vdisk.Record(ctx, o, s.Out))
		},
	}
	f := c.Flags()
	f.IntVarP(&o.PID, "pid", "p", 0, "the process of the virtual machine")
	f.BoolVar(&o.Guest, "guest", false, "record the guest's half, inside the virtual machine")
	f.StringVar(&o.Path, "output", "", "file to record into; it must not exist")
	f.DurationVar(&o.Duration, "duration", time.Duration(0), "end after this time; 0: at Ctrl-C")
	f.Int64Var(&limit, "limit", 64, "size in MiB at which the recording ends; 1 MiB holds about 1000 requests")
	f.StringArrayVar(&probes, "probe", nil, "also record when requests reach this function: qemu:SYMBOL or kernel:FUNCTION; repeat the flag for more")
	maxCPUFlag(c, &maxCPU)
	tool.BTFFlag(c, &btf)
	return c
}

func newDiagVdiskReport(s cli.Streams) *cobra.Command {
	var slowest int
	var all, chain bool
	var output, plot string
	c := &cobra.Command{
		Use:   "report FILE [FILE]",
		Short: "Show for each request in a recording where its bytes are, and how long it was in each layer",
		Long: `Join the events of a recording into requests, and report them.

A request is at each moment in the deepest layer in which any part of it is, so its times add up:

  qemu       device model and block layer, from the guest's request on; also between two parts
  hand-over  waits for a thread of qemu, or for a batch
  vfs        system call and file system, and the copy to the page cache
  limit      held back by a limit of a cgroup (io.max)
  queue      in the block layer, until the driver has it
  device     driver and device
  return     from the end of the last part until the device model has its answer

With the recordings of a host and of its guest, requests are the guest's, and these layers are added:

  guest-fs      the guest's system call and file system, before the call's first request
  guest-limit   instead of guest-fs, if a cgroup of the guest limits the call's IO
  guest-queue   in the guest's block layer, until its driver has it
  virtio        from the guest's driver until qemu's device model has the request
  notify        from the device model's answer until the guest's driver has ended the request
  guest-return  from the end of the request until the system call ends, if it waited for this request alone

The two clocks are compared by the requests themselves, and the error is printed. A request that cannot be
joined is counted, with the reason. A guest's recording alone has the layer "below" instead.

FILE is the place that qemu-img names for the request, if qemu used that place; else the first place that
qemu used. The table shows only the first place; --chain and -o json show all.`,
		Example: `  shunt diag vdisk report vm.rec --slowest 20
  shunt diag vdisk report vm.rec --plot vm.svg  # the ten slowest, time by layer
  shunt diag vdisk report vm.rec guest.rec
  shunt diag vdisk report vm.rec guest.rec --chain -n 3  # each place of the three slowest, down to the disk
  shunt diag vdisk report vm.rec -o json | jq 'select(.layers_ns.device > 10000000)'`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return cli.UsageError{Err: errors.New("give one recording, or the recordings of a host and of its guest: `shunt diag vdisk report FILE [FILE]`")}
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			if slowest < 0 {
				return cli.UsageError{Err: errors.New("--slowest cannot be negative")}
			}
			if chain && (plot != "" || output == "json") {
				return cli.UsageError{Err: errors.New("--chain, --plot and -o json are three forms of one report: give one")}
			}
			report, err := readVdisk(args)
			if err != nil {
				return err
			}
			if plot != "" {
				return writePlot(report, plot, slowest)
			}
			if output == "json" {
				return report.PrintJSON(s.Out)
			}
			if all {
				slowest = -1
			}
			if chain {
				return report.Chain(s.Out, slowest)
			}
			return report.Print(s.Out, slowest)
		},
	}
	c.Flags().IntVarP(&slowest, "slowest", "n", 10, "number of slowest requests to show")
	c.Flags().BoolVar(&all, "all", false, "show all requests, by their beginning")
	c.Flags().BoolVar(&chain, "chain", false, "show each request with all its places, from the guest's file to the disk, instead of tables")
	c.Flags().StringVar(&plot, "plot", "", "write the slowest requests into this file instead, as bars of their layers (SVG)")
	cli.OutputFlag(c, &output)
	return c
}

// vdiskReport is a report of a host, of a guest, or of both.
type vdiskReport interface {
	Print(out io.Writer, slowest int) error
	PrintJSON(out io.Writer) error
	Chain(out io.Writer, slowest int) error
	Plot(out io.Writer, slowest int) error
}

func readVdisk(paths []string) (vdiskReport, error) {
	var all []*vdisk.Recording
	for _, path := range paths {
		file, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("read the recording: %w", err)
		}
		rec, err := vdisk.Decode(bufio.NewReaderSize(file, 1<<20))
		_ = file.Close() // only read
		if err != nil {
			return nil, fmt.Errorf("read the recording %s: %w", path, err)
		}
		all = append(all, rec)
	}
	switch {
	case len(all) == 2:
		return vdisk.Join(all[0], all[1])
	case all[0].Head.Kind == vdisk.KindGuest:
		return vdisk.OfGuest(all[0]), nil
	}
	return vdisk.Of(all[0]), nil
}

func writePlot(report vdiskReport, path string, slowest int) error {
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("write the plot: %w", err)
	}
	if err := errors.Join(report.Plot(file, slowest), file.Close()); err != nil {
		return fmt.Errorf("write the plot %s: %w", path, err)
	}
	return nil
}
