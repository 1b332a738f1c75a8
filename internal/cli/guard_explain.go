package cli

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/kernel"
)

func newGuardExplain(s streams) *cobra.Command {
	var file, output string
	c := &cobra.Command{
		Use:   "explain PATH|ADDRESS PID",
		Short: "Say what a process may do to a file or an address, by which rules, and why it is trusted or not (needs root)",
		Long: `Say of each operation whether it would be denied to a process, by which rules, and why these trust the process or
do not: who in its chain gave the trust, and who lost it, by what. PATH may be a new name in a folder.
With ADDRESS or ADDRESS:PORT instead, it says what rules of connections would deny.

The answer is what the kernel has: the label of the inode, and the trust of the process, also while no
` + "`shunt guard run`" + ` is at work. With --policy it is what a file would say, for a policy that is not in
force yet; then the trust is looked up in /proc, which does not know what was lost before now. The first lines
say which of the two it is, and whether it is enforced on this kernel. Nothing is attached, and nothing changed.`,
		Example: `  sudo shunt guard explain /srv/data/today 4711
  sudo shunt guard explain /srv/data/today $$ --policy guard.yaml
  sudo shunt guard explain 192.0.2.1:443 4711`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return usageError{errors.New("name a file or an address, and the number of a process")}
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if err := requireOutput(output); err != nil {
				return err
			}
			process, err := strconv.Atoi(args[1])
			if err != nil || process < 1 {
				return usageError{fmt.Errorf("%q is no number of a process", args[1])}
			}
			var p policy.Policy
			if file != "" {
				if p, err = loadPolicy(s, file); err != nil {
					return err
				}
			}
			if err := requireRoot("guard explain", "reads what is in the kernel, and the environment of processes"); err != nil {
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
				return writeJSON(s.out, e)
			}
			return printExplanation(s.out, e, file)
		},
	}
	c.Flags().StringVar(&file, "policy", "", "ask this policy, instead of the one in force")
	outputFlag(c, &output)
	return c
}

func explain(p policy.Policy, file, path string, process int) (*protect.Explanation, error) {
	if file != "" {
		return protect.ExplainPolicy(p, path, process)
	}
	e, err := protect.Explain(kernel.DefaultPinRoot, path, process)
	if err == nil && e == nil {
		err = errors.New("nothing is protected: no program of the guard is attached, so nothing is denied. Ask what a policy would say with --policy FILE")
	}
	return e, err
}

func printExplanation(w io.Writer, e *protect.Explanation, file string) error {
	if e.From == protect.FromPolicy {
		fmt.Fprintf(w, "NOT IN FORCE: this is what %s would say.\n", file)
	} else {
		fmt.Fprintf(w, "This is what the kernel has, of policy %d.\n", e.Policy)
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

func objectText(o protect.Object) string {
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
		text += "; it has what is protected by " + ruleNames(o.Above) + " below it"
	}
	if len(o.Program) > 0 {
		text += "; a program that is trusted by " + ruleNames(o.Program)
	}
	return text
}

func answerText(a protect.Answer) string {
	switch a.Verdict {
	case protect.Denied:
		return "DENIED by " + ruleNames(a.Rules)
	case protect.Audited:
		return "allowed, and told: " + ruleNames(a.Rules) + " is in mode audit"
	case protect.NoObject:
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
