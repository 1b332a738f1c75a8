package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/value"
)

func newGuard(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "guard COMMAND",
		Short: "Have the kernel protect files and processes from all but trusted programs (needs root)",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("there is no command %q of `shunt guard`", args[0])}
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newGuardCheck(s), newGuardSchema(s), newGuardRun(s), newGuardStatus(s), newGuardStop(s), newGuardSuggest(s))
	return c
}

func newGuardCheck(s streams) *cobra.Command {
	var output string
	var host bool
	c := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a policy: report all faults with place and suggestion; no root",
		Long: `Check a policy, and report all faults with place and suggestion. With --host it also asks this
machine's kernel whether it would enforce the policy (needs root): if not, the first line says which
operations are not enforced. That is a fault if a rule has mode deny, unless the policy has
degraded: allow. Nothing is attached.`,
		Args: oneFile,
		RunE: func(_ *cobra.Command, args []string) error {
			if err := requireOutput(output); err != nil {
				return err
			}
			p, faults, err := policy.Load(args[0])
			if err != nil {
				return err
			}
			bad := config.HasErrors(faults)
			if output == "json" {
				if err := writeJSON(s.out, map[string]any{"ok": !bad, "faults": nonNil(faults)}); err != nil {
					return err
				}
			} else if err := printPolicy(s.out, args[0], p, faults); err != nil {
				return err
			}
			if bad {
				return errSilent
			}
			if host {
				return checkHost(s, p, protect.Enforces)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&host, "host", false, "also ask this kernel whether it enforces the policy (needs root)")
	outputFlag(c, &output)
	return c
}

// checkHost says whether the kernel enforces a policy.
func checkHost(s streams, p policy.Policy, enforces func() error) error {
	if err := requireRoot("guard check --host", "asks the kernel to load programs"); err != nil {
		return err
	}
	err := enforces()
	var refused *protect.Refusal
	if errors.As(err, &refused) {
		return notEnforced(s, p, refused)
	}
	if err == nil {
		fmt.Fprintln(s.err, "This kernel enforces all of it.")
	}
	return err
}

func oneFile(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usageError{errors.New("name one policy file, or a directory of *.yaml")}
	}
	return nil
}

func printPolicy(w io.Writer, file string, p policy.Policy, faults []config.Fault) error {
	if err := config.Render(w, faults); err != nil || config.HasErrors(faults) {
		return err
	}
	fmt.Fprintf(w, "%s is a policy of %s.\n", file, value.Counted(len(p.Rules), "rule"))
	for _, r := range p.Rules {
		fmt.Fprintf(w, "  %s: %v\n", r.Name, r)
	}
	return nil
}

func newGuardSchema(s streams) *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of policies, for editors",
		Args:  noArguments,
		RunE: func(*cobra.Command, []string) error {
			_, err := s.out.Write(policy.Schema())
			return err
		},
	}
}

// loadPolicy reads the policy that --policy names, and says what is wrong with it.
func loadPolicy(s streams, file string) (policy.Policy, error) {
	if file == "" {
		return policy.Policy{}, usageError{errors.New("name the policy with --policy FILE")}
	}
	p, faults, err := policy.Load(file)
	if err != nil {
		return p, err
	}
	if err := config.Render(s.err, faults); err != nil {
		return p, err
	}
	if config.HasErrors(faults) {
		return p, errSilent
	}
	return p, nil
}

func newGuardRun(s streams) *cobra.Command {
	var file, output string
	c := &cobra.Command{
		Use:   "run --policy FILE",
		Short: "Protect what a policy says, and tell what is denied, until Ctrl-C (needs root)",
		Long: `Have the kernel protect the files of a policy, and print each operation that is denied, or that
would be (mode: audit). The protection does not need this process: it goes on when the process ends
in any way, also after Ctrl-C, until ` + "`shunt guard stop`" + ` or the next boot. Running the command
again takes it over, with a new policy if there is one, and SIGHUP has it read the file again: the
kernel switches from one policy to the other at once.

The kernel must let BPF programs decide (BPF LSM). If it does not, the first line says what is not
enforced and why. The command then exits with 1 if a rule has mode deny and the policy has not
degraded: allow, and else with 0.`,
		Example: `  shunt guard check guard.yaml
  sudo shunt guard run --policy guard.yaml`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := requireOutput(output); err != nil {
				return err
			}
			p, err := loadPolicy(s, file)
			if err != nil {
				return err
			}
			if err := requireRoot("guard run", "puts programs into the kernel"); err != nil {
				return err
			}
			return runGuard(c, s, p, file, output)
		},
	}
	c.Flags().StringVar(&file, "policy", "", "the policy: a file, or a directory of *.yaml")
	outputFlag(c, &output)
	return c
}

func runGuard(c *cobra.Command, s streams, p policy.Policy, file, output string) error {
	log, err := newLog(s.err, "text", false)
	if err != nil {
		return err
	}
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, unix.SIGHUP) // before anybody can know that it is at work
	defer signal.Stop(hangup)
	g, err := protect.Start(kernel.DefaultPinRoot, p, log)
	var refused *protect.Refusal
	if errors.As(err, &refused) {
		return notEnforced(s, p, refused)
	}
	if err != nil {
		return err
	}
	defer g.Close()
	tell := func(a protect.Attempt) error {
		_, err := fmt.Fprintln(s.out, a)
		return err
	}
	if output == "json" {
		lines := json.NewEncoder(s.out)
		tell = func(a protect.Attempt) error { return lines.Encode(a) }
	}
	notes := s.out
	if output == "json" {
		notes = s.err
	}
	begins := "protected from now on"
	if g.Adopted {
		begins = "protected without interruption"
	}
	fmt.Fprintf(notes, "%s, %s: %s.\n", value.Counted(g.Files, "inode"), value.Counted(len(p.Rules), "rule"), begins)
	for _, r := range p.Rules {
		fmt.Fprintf(notes, "  %s: %v\n", r.Name, r)
	}
	if g.Unheard > 0 {
		fmt.Fprintf(notes, "%s while nobody listened; `shunt guard status` counts them\n", value.Counted(int(g.Unheard), "attempt"))
	}
	g.Warn(s.err)
	ctx, cancel := untilStopped(c.Context())
	defer cancel()
	reloaded := make(chan struct{})
	go func() {
		defer close(reloaded)
		reload(ctx, g, hangup, file, s.err)
	}()
	defer func() {
		cancel()
		<-reloaded // before the maps are closed
	}()
	if err := g.Listen(ctx, tell); err != nil {
		return err
	}
	sum := g.Summary()
	fmt.Fprintf(notes, "%d told, %d lost. All stays protected; `shunt guard stop` ends that.\n", sum.Received, sum.Lost)
	return nil
}

// applier is a *protect.Guard.
type applier interface {
	Apply(policy.Policy) error
	Warn(io.Writer)
}

// reload loads the file again at each SIGHUP. A policy that cannot be loaded changes nothing.
func reload(ctx context.Context, g applier, asked <-chan os.Signal, file string, say io.Writer) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-asked:
		}
		p, faults, err := policy.Load(file)
		if err == nil {
			err = config.Render(say, faults)
		}
		if err == nil && config.HasErrors(faults) {
			err = errors.New("it has the faults above")
		}
		if err == nil {
			err = g.Apply(p)
		}
		if err != nil {
			fmt.Fprintf(say, "reload %s: %v. The policy before stays in force\n", file, err)
			continue
		}
		fmt.Fprintf(say, "reloaded %s: %s\n", file, value.Counted(len(p.Rules), "rule"))
		g.Warn(say)
	}
}

// notEnforced says first what the user must not rely on. It is a fault if something is to be denied, unless
// the policy allows that.
func notEnforced(s streams, p policy.Policy, refused *protect.Refusal) error {
	denies := false
	fmt.Fprintln(s.err, "NOT PROTECTED: nothing of the policy is enforced on this kernel, and nothing was attached.")
	for _, r := range p.Rules {
		fmt.Fprintf(s.err, "  %s is not enforced: %v\n", r.Name, r)
		denies = denies || r.Mode == policy.Deny
	}
	fmt.Fprintf(s.err, "why: %s\nwhat to do: %s.\n", refused.Reason, refused.Remedy)
	if !denies || p.IsDegraded {
		return nil
	}
	fmt.Fprintln(s.err, "With degraded: allow in the policy, this is no failure.")
	return errSilent
}

func newGuardStatus(s streams) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "status",
		Short: "Say what is protected, and whether a process listens (needs root)",
		Long: `Say what the kernel protects, since when, and whether ` + "`shunt guard run`" + ` is at work. It exits with 1
if nothing is protected.`,
		Args: noArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := errors.Join(requireOutput(output), requireRoot("guard status", "reads what is in the kernel")); err != nil {
				return err
			}
			status, err := protect.Look(kernel.DefaultPinRoot)
			if err != nil {
				return err
			}
			if output == "json" {
				err = writeJSON(s.out, map[string]any{"protected": status != nil, "guard": status})
			} else if status != nil {
				printGuardStatus(s.out, status, time.Now())
			} else {
				fmt.Fprintln(s.out, "Nothing is protected: no program of the guard is attached.")
			}
			if err == nil && status == nil {
				return errSilent
			}
			return err
		},
	}
	outputFlag(c, &output)
	return c
}

func printGuardStatus(w io.Writer, status *protect.Status, now time.Time) {
	ago := func(t time.Time) string { return now.Sub(t).Round(time.Second).String() }
	fmt.Fprintf(w, "Protected for %s, by %s at %s; the policy is of %s ago.\n", ago(status.Since), value.Counted(len(status.Rules), "rule"), value.Counted(status.Hooks, "hook"), ago(status.Loaded))
	if status.Listening {
		fmt.Fprintln(w, "A process listens.")
	} else {
		fmt.Fprintf(w, "Nobody has listened for %s. Files are protected all the same; `shunt guard run` tells again.\n", ago(status.Heard))
	}
	fmt.Fprintf(w, "%d denied, %d audited, %d of these told to nobody.\n", status.Denied, status.Audited, status.Unheard)
	if status.Missed > 0 {
		fmt.Fprintf(w, "warning: %d operations were not examined, because this kernel leaves a program out that is at work on the same CPU: use Linux 6.1.54 or later\n", status.Missed)
	}
	if status.Untrusted > 0 {
		fmt.Fprintf(w, "warning: %d processes were neither trusted nor protected, because there were too many: protect and trust fewer programs\n", status.Untrusted)
	}
	if status.Unrecord > 0 {
		fmt.Fprintf(w, "warning: %d new files are protected only by their folder, because there are too many: protect fewer\n", status.Unrecord)
	}
	for _, r := range status.Rules {
		fmt.Fprintf(w, "  %s: %s\n", r.Name, r.Text)
	}
}

func newGuardStop(s streams) *cobra.Command {
	return &cobra.Command{
		Use:   "stop",
		Short: "End the protection, and take everything of it out of the kernel (needs root)",
		Args:  noArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := requireRoot("guard stop", "takes programs out of the kernel"); err != nil {
				return err
			}
			running, err := protect.Running(kernel.DefaultPinRoot)
			if err != nil {
				return err
			}
			if running {
				return errors.New("a `shunt guard run` is at work, and would go on as if it protected: end it first")
			}
			was, err := protect.Stop(kernel.DefaultPinRoot)
			if err != nil {
				return err
			}
			if !was {
				fmt.Fprintln(s.out, "Nothing was protected.")
				return nil
			}
			fmt.Fprintln(s.out, "Nothing is protected any more.")
			return nil
		},
	}
}
