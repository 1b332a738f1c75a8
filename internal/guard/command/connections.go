package command

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"text/tabwriter"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/value"
)

// printConnections lists rules of connections.
func printConnections(w io.Writer, file string, rules []policy.Connection) {
	if len(rules) == 0 {
		return
	}
	fmt.Fprintf(w, "%s has %s for connections.\n", file, value.Counted(len(rules), "rule"))
	for _, r := range rules {
		fmt.Fprintf(w, "  %s: %v\n", r.Name, r)
	}
}

// checkConnections prints how the kernel enforces rules of connections.
func checkConnections(s cli.Streams, p policy.Policy, enforces func(policy.Policy) (connect.Coverage, error)) error {
	if err := cli.RequireRoot("guard check --host", "asks the kernel to load programs"); err != nil {
		return err
	}
	c, err := enforces(p)
	var not *connect.NotEnforced
	if err != nil && !errors.As(err, &not) {
		return err
	}
	for _, gap := range c.Missing(p.Connections) {
		fmt.Fprintf(s.Err, "NOT ENFORCED: %s in rule %q for connections: %s.\n", gap.Operation, gap.Rule, gap.Why)
	}
	fmt.Fprintf(s.Err, "Connections: this kernel denies them %s.\n", wayText(c.Way))
	if c.Why != "" {
		fmt.Fprintf(s.Err, "why the security hooks are not used: %s.\n", c.Why)
	}
	if not != nil {
		fmt.Fprintln(s.Err, "With degraded: allow in the policy, this is not a failure.")
		return cli.ErrSilent
	}
	return nil
}

func wayText(way connect.Way) string {
	if way == connect.LSM {
		return "at security hooks (BPF LSM)"
	}
	return "at a cgroup"
}

// printConnectionsStatus begins with the operations that are not enforced.
func printConnectionsStatus(w io.Writer, status *connect.Status) {
	if status == nil {
		return
	}
	if len(status.Not) > 0 {
		fmt.Fprintf(w, "NOT ENFORCED for connections: %s.\n", strings.Join(status.Not, ", "))
	}
	enforced := "nothing"
	if len(status.Enforced) > 0 {
		enforced = strings.Join(status.Enforced, ", ")
	}
	fmt.Fprintf(w, "Connections: %s enforced %s, by %s at %s; %d denied, %d audited.\n", enforced, wayText(status.Way), value.Counted(len(status.Rules), "rule"),
		value.Counted(status.Hooks, "hook"), status.Denied, status.Audited)
	if status.Untracked > 0 {
		fmt.Fprintf(w, "warning: %d processes that a program of a rule has started are not under that rule, because there were too many\n", status.Untracked)
	}
	printRules(w, status.Rules)
}

// explainConnection prints the operations that a process may do with an address.
func explainConnection(s cli.Streams, p policy.Policy, file string, at netip.AddrPort, process int, isJSON bool) (err error) {
	var e *connect.Explanation
	if file != "" {
		e, err = connect.ExplainPolicy(p, at, process)
	} else {
		e, err = connect.Explain(kernel.DefaultPinRoot, at, process)
	}
	if err == nil && e == nil {
		err = errors.New("no rule of connections is in force, so no connection is denied. Use --policy FILE to ask a policy that is not in force")
	}
	if err != nil {
		return err
	}
	if isJSON {
		return cli.WriteJSON(s.Out, e)
	}
	return printConnectionExplanation(s.Out, e, file)
}

func printConnectionExplanation(w io.Writer, e *connect.Explanation, file string) error {
	if e.InForce {
		fmt.Fprintf(w, "This is the kernel's answer, which it gives %s.\n", wayText(e.Way))
	} else {
		fmt.Fprintf(w, "NOT IN FORCE: this is the answer of %s. The kernel would give it %s.\n", file, wayText(e.Way))
	}
	fmt.Fprintf(w, "Address: %s\nProcess: %d (%s), %s\nOperations:\n", e.Address, e.PID, event.Printable(e.Comm), event.Printable(e.Program))
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, a := range e.Operations {
		text := "allowed: no rule forbids it"
		switch {
		case len(a.Denied) > 0:
			text = "DENIED by " + ruleNames(a.Denied)
		case len(a.Audited) > 0:
			text = "allowed, and reported: " + ruleNames(a.Audited) + " is in mode audit"
		}
		if a.Gap != "" {
			text += "; NOT ENFORCED: " + a.Gap
		}
		fmt.Fprintf(table, "  %s\t%s\n", a.Operation, text)
	}
	return table.Flush()
}

// noAgent refuses while a `shunt guard run` is at work.
func noAgent(folder string) error {
	running, err := agent.Ask(folder)
	if err == nil && running != nil {
		err = errors.New("a `shunt guard run` is running, and would go on without protecting anything: end it first")
	}
	return err
}

// leftConnections lists the rules in the kernel that deny connections.
func leftConnections(folder string) ([]cli.Trace, error) {
	status, err := connect.Look(kernel.DefaultPinRoot)
	if err != nil || status == nil {
		return nil, err
	}
	if err := noAgent(folder); err != nil {
		return nil, errors.New("`shunt guard run` is running; end it first")
	}
	return []cli.Trace{{Kind: "guard", What: "denial of connections by " + value.Counted(len(status.Rules), "rule"), Remove: func() error {
		_, err := connect.Stop(kernel.DefaultPinRoot)
		return err
	}}}, nil
}
