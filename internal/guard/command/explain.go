package command

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/kernel"
)

func newGuardExplain(s cli.Streams) *cobra.Command {
	var file, output string
	c := &cobra.Command{
		Use:   "explain PATH|ADDRESS PID",
		Short: "Show what a process may do to a file or an address, which rules decide, and why they trust the process or not (needs root)",
		Long: `Show for each operation whether it would be denied to a process, by which rules, and why the rules trust the
process or not: which process of its chain gave the trust, which one lost it, and by which action. PATH may be
a new name in a folder. With ADDRESS or ADDRESS:PORT instead, the command shows the connections that rules
would deny.

The answer comes from the kernel: from the label of the inode and the trust of the process, even while no
` + "`shunt guard run`" + ` is running. With --policy it comes from a file, for a policy that is not in force yet;
the trust is then derived from /proc, which does not show trust that was lost before. Without BPF LSM, and with
degraded: allow, the answer comes from the ` + "`shunt guard run`" + ` that opens wait for. The first lines say where the
answer comes from, and whether this kernel enforces it. Nothing is attached, and nothing changed.`,
		Example: `  sudo shunt guard explain /srv/data/today 4711
  sudo shunt guard explain /srv/data/today $$ --policy guard.yaml
  sudo shunt guard explain 192.0.2.1:443 4711`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return cli.UsageError{Err: errors.New("name a file or an address, and the number of a process")}
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			process, err := strconv.Atoi(args[1])
			if err != nil || process < 1 {
				return cli.UsageError{Err: fmt.Errorf("%q is not the number of a process", args[1])}
			}
			var p policy.Policy
			if file != "" {
				if p, err = loadPolicy(s, file); err != nil {
					return err
				}
			}
			if err := cli.RequireRoot("guard explain", "reads maps of the kernel, and the environment of processes"); err != nil {
				return err
			}
			if at, is := connect.Address(args[0]); is {
				return explainConnection(s, p, file, at, process, output == "json")
			}
			e, err := explain(p, file, args[0], process)
			if err != nil {
				return err
			}
			if output == "json" {
				return cli.WriteJSON(s.Out, e)
			}
			return printExplanation(s.Out, e, file)
		},
	}
	c.Flags().StringVar(&file, "policy", "", "ask this policy instead of the policy in force")
	cli.OutputFlag(c, &output)
	return c
}

func explain(p policy.Policy, file, path string, process int) (*judge.Explanation, error) {
	if file != "" {
		return protect.ExplainPolicy(p, path, process)
	}
	e, err := protect.Explain(kernel.DefaultPinRoot, path, process)
	if err == nil && e == nil {
		e, err = agent.Explain(agent.RunDirectory, path, process)
	}
	if err == nil && e == nil {
		err = errors.New("nothing is protected: no program of the guard is attached, and opens wait for no process, so no operation is denied. Use --policy FILE to ask a policy that is not in force")
	}
	return e, err
}

func printExplanation(w io.Writer, e *judge.Explanation, file string) error {
	switch e.From {
	case judge.FromPolicy:
		fmt.Fprintf(w, "NOT IN FORCE: this is the answer of %s.\n", file)
	case judge.FromOpens:
		fmt.Fprintln(w, "This is the answer of `shunt guard run`, which opens of protected files wait for: this kernel has no BPF LSM.")
	default:
		fmt.Fprintf(w, "This is the kernel's answer, under policy %d.\n", e.Policy)
	}
	if !e.Enforced {
		fmt.Fprintf(w, "Not enforced: %s.\n", e.Why)
	}
	o, first := e.File, e.Process.Chain[0]
	fmt.Fprintf(w, "File: %s\n", objectText(o))
	fmt.Fprintf(w, "Process: %d (%s), %s\n", first.PID, event.Printable(first.Comm), event.Printable(first.Program))
	if len(e.Process.Protected) > 0 {
		fmt.Fprintf(w, "  It is protected itself, by %s.\n", ruleNames(e.Process.Protected))
	}
	fmt.Fprintln(w, "Operations:")
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, a := range e.Operations {
		fmt.Fprintf(table, "  %s\t%s\n", a.Operation, answerText(a))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, r := range e.Process.Trusted {
		fmt.Fprintf(w, "Rule %s trusts it: %s.\n", r.Rule, event.Printable(r.Why))
	}
	for _, r := range e.Process.Untrusted {
		fmt.Fprintf(w, "Rule %s does not trust it: %s.\n", r.Rule, event.Printable(r.Why))
	}
	fmt.Fprintln(w, "Chain:")
	for _, a := range e.Process.Chain {
		fmt.Fprintf(w, "  %d %s, %s: trusted by %s", a.PID, event.Printable(a.Comm), event.Printable(a.Program), ruleNames(a.Trusted))
		if len(a.Gives) > 0 {
			fmt.Fprintf(w, "; named by %s", ruleNames(a.Gives))
		}
		fmt.Fprintln(w)
	}
	return nil
}

func objectText(o judge.Object) string {
	text := event.Printable(o.Path)
	if o.Exists {
		text += fmt.Sprintf(", inode %d of device %s", o.Inode, o.Device)
	} else {
		text += ", which does not exist"
	}
	if len(o.Rules) > 0 {
		text += fmt.Sprintf("; under %s, by %s", ruleNames(o.Rules), o.By)
	} else {
		text += "; under no rule"
	}
	if len(o.Above) > 0 {
		text += "; files below it are protected by " + ruleNames(o.Above)
	}
	if len(o.Program) > 0 {
		text += "; a program that is trusted by " + ruleNames(o.Program)
	}
	return text
}

func answerText(a judge.Answer) string {
	switch a.Verdict {
	case judge.Denied:
		return "DENIED by " + ruleNames(a.Rules)
	case judge.Audited:
		return "allowed, and reported: " + ruleNames(a.Rules) + " is in mode audit"
	case judge.Unenforced:
		return "NOT ENFORCED: " + ruleNames(a.Rules) + " would need BPF LSM"
	case judge.NoObject:
		return "-"
	}
	if len(a.Trusted) > 0 {
		return "allowed: trusted by " + ruleNames(a.Trusted)
	}
	return "allowed: no rule forbids it"
}

func ruleNames(names []string) string {
	if len(names) == 0 {
		return "no rule"
	}
	return event.Printable(strings.Join(names, ", "))
}
