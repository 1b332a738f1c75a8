package command

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/demo"
	"github.com/spf13/cobra"
)

func newDemoGuard(s cli.Streams) *cobra.Command {
	var output, image string
	c := &cobra.Command{
		Use:   "guard",
		Short: "Show a folder that only the business's program may change, and how a reverse shell and an encryptor are stopped",
		Long: `Protect a folder with "shunt guard run", and let an editor, a shell, the business's program, a script that
this program starts, and a copy of it try to change a file. Let an intruder open a reverse shell, and encrypt
files with decoys among them. Kill the guard, and check every claim that the demo makes. If this kernel lets
BPF programs decide (BPF LSM), the demo runs on it, and needs root; it protects only a folder of its own, and
everything ends with the demo. Otherwise, and without root, it boots a virtual machine, emulated by qemu, with
a kernel of this machine, or with the kernel of --kernel; if qemu or the kernel is missing, the demo says
which packages to install. It removes everything at its end, also after Ctrl-C. It exits with 1 if a claim
was not true.`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			executable, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find the shunt binary, which the demo runs as guard and business program: %w", err)
			}
			out := s.Out
			if output == "json" {
				out = s.Err
			}
			d, err := demo.New(demo.Options{Executable: executable, Kernel: image, Out: out})
			if err != nil {
				return err
			}
			return cli.Tell(c.Context(), s, out, output, func(ctx context.Context) (cli.Ending, error) {
				facts, err := d.Run(ctx)
				return cli.Ending{Facts: facts, Claims: facts.Claims, Seconds: facts.Seconds, OK: facts.OK}, err
			}, nil)
		},
	}
	c.Flags().StringVar(&image, "kernel", "", "use a virtual machine with this kernel, for example /boot/vmlinuz-6.12")
	cli.OutputFlag(c, &output)
	return c
}

// newDemoGuardStage is the hidden command that the guard's demo starts on a kernel that enforces policies.
func newDemoGuardStage(s cli.Streams) *cobra.Command {
	var folder string
	var isMachine bool
	c := &cobra.Command{
		Use:    "guard-stage",
		Hidden: true,
		Short:  "Run the story of the guard's demo, in a mount namespace or a machine of its own",
		Args:   cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if isMachine {
				demo.Machine(c.Context())
			}
			return demo.Stage(c.Context(), folder, s.Out)
		},
	}
	c.Flags().StringVar(&folder, "folder", "", "where the story's files are")
	c.Flags().BoolVar(&isMachine, "machine", false, "be the first process of a virtual machine")
	return c
}

// newDemoGuardIntruder is the hidden command of the intruder in the guard's demo.
func newDemoGuardIntruder() *cobra.Command {
	return &cobra.Command{
		Use:    "guard-intruder ATTEMPT TARGET",
		Hidden: true,
		Short:  "Do what an intruder does, in the guard's demo",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return cli.UsageError{Err: errors.New("name an attempt and its target")}
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error { return demo.Intrude(args[0], args[1]) },
	}
}

// newDemoGuardLedger is the business's program of the guard's demo.
func newDemoGuardLedger() *cobra.Command {
	var line, script string
	c := &cobra.Command{
		Use:    "guard-ledger FILE",
		Hidden: true,
		Short:  "Change a file, as the business's program of the guard's demo",
		Args:   oneFile,
		RunE:   func(_ *cobra.Command, args []string) error { return demo.Ledger(line, script, args[0]) },
	}
	c.Flags().StringVar(&line, "add", "", "a line that is added")
	c.Flags().StringVar(&script, "start", "", "a script that is started with the file")
	return c
}
