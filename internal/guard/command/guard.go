package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/cli/tool"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/decoy"
	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/gate"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/metrics"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/shunt-lb/shunt/sensor"
)

func newGuard(s cli.Streams) *cobra.Command {
	c := cli.Group(&cobra.Command{
		Use:   "guard COMMAND",
		Short: "Protect files and processes from all but trusted programs, and detect intruders (needs root)",
	})
	c.AddCommand(newGuardCheck(s), newGuardSchema(s), newGuardRun(s), newGuardStatus(s), newGuardStop(s), newGuardExplain(s), newGuardFeature(s, agent.RunDirectory), newGuardSuggest(s),
		newGuardEvents(s), newGuardTest(s), newGuardRules(s), newGuardFields(s), newGuardBaseline(s), newGuardDecoys(s))
	return c
}

func newGuardCheck(s cli.Streams) *cobra.Command {
	var output string
	var host bool
	c := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a policy: report all faults, each with its line and a suggestion; no root",
		Long: `Check a policy, and report all faults, each with its line and a suggestion. With --host the command also asks
this machine's kernel whether it would enforce the policy (needs root): if not, the first line names the
operations that are not enforced. This is a fault if a rule has mode deny, unless the policy has degraded:
allow, with which opens of files are still refused. The command attaches the guard's programs for a moment,
without a policy.`,
		Args: oneFile,
		RunE: func(_ *cobra.Command, args []string) error {
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			p, faults, err := policy.Load(args[0])
			if err != nil {
				return err
			}
			for _, one := range judge.Scripts(p) {
				faults = append(faults, config.Fault{File: one.At, Severity: config.SeverityError, Message: one.Problem, Suggestion: one.Remedy})
			}
			bad := config.HasErrors(faults)
			if output == "json" {
				if err := cli.WriteJSON(s.Out, map[string]any{"ok": !bad, "faults": cli.NonNil(faults)}); err != nil {
					return err
				}
			} else if err := printPolicy(s.Out, args[0], p, faults); err != nil {
				return err
			}
			if bad {
				return cli.ErrSilent
			}
			if !host {
				return nil
			}
			if len(p.Connections) > 0 {
				err = checkConnections(s, p, connect.Enforces)
			}
			if len(p.Enforced()) > 0 {
				err = errors.Join(err, checkHost(s, p, protect.Enforces))
			}
			return err
		},
	}
	c.Flags().BoolVar(&host, "host", false, "also ask this kernel whether it enforces the policy (needs root)")
	cli.OutputFlag(c, &output)
	return c
}

// checkHost prints whether the kernel enforces a policy.
func checkHost(s cli.Streams, p policy.Policy, enforces func() error) error {
	if err := cli.RequireRoot("guard check --host", "asks the kernel to load programs"); err != nil {
		return err
	}
	err := enforces()
	var refused *protect.Refusal
	if errors.As(err, &refused) && p.IsDegraded && gate.CanHold() == nil {
		sayDegraded(s.Err, gate.Missing(p.Enforced()), p, refused)
		return nil
	}
	if errors.As(err, &refused) {
		return notEnforced(s, p, refused)
	}
	if err == nil {
		fmt.Fprintln(s.Err, "This kernel enforces the whole policy.")
	}
	return err
}

func oneFile(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return cli.UsageError{Err: errors.New("name one policy file, or a directory of *.yaml")}
	}
	return nil
}

func printPolicy(w io.Writer, file string, p policy.Policy, faults []config.Fault) error {
	if err := config.Render(w, faults); err != nil || config.HasErrors(faults) {
		return err
	}
	if len(p.Rules) > 0 || !p.Watches() {
		fmt.Fprintf(w, "%s is a policy of %s.\n", file, value.Counted(len(p.Rules), "rule"))
	}
	for _, r := range p.Rules {
		fmt.Fprintf(w, "  %s: %v\n", r.Name, r)
	}
	printConnections(w, file, p.Connections)
	if p.Detection.IsOn {
		fmt.Fprintf(w, "%s detects by %s, %d of its own. `shunt guard run --policy %s` watches for them.\n", file, value.Counted(len(p.Detection.Active()), "rule"), len(p.Detection.Rules), file)
	}
	for _, r := range p.Denials() {
		fmt.Fprintf(w, "  %s: %v: the kernel refuses it beforehand\n", r.Name, r)
	}
	if len(p.Decoys) > 0 {
		fmt.Fprintf(w, "%s has decoys. `shunt guard run --policy %s` makes them, and watches them.\n", file, file)
	}
	for _, d := range p.Decoys {
		fmt.Fprintf(w, "  %v\n", d)
	}
	return nil
}

func newGuardSchema(s cli.Streams) *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of policies, for editors",
		Args:  cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			_, err := s.Out.Write(policy.Schema())
			return err
		},
	}
}

// loadPolicy reads the policy that --policy names, and prints its faults.
func loadPolicy(s cli.Streams, file string) (policy.Policy, error) {
	if file == "" {
		return policy.Policy{}, cli.UsageError{Err: errors.New("name the policy with --policy FILE")}
	}
	p, faults, err := policy.Load(file)
	if err != nil {
		return p, err
	}
	if err := config.Render(s.Err, faults); err != nil {
		return p, err
	}
	if config.HasErrors(faults) {
		return p, cli.ErrSilent
	}
	return p, nil
}

// guardRun are the flags of `shunt guard run`.
type guardRun struct {
	file, output, cgroup, folder, decoys string
	types                                sensor.BTF
	log                                  string // a file, which has the lines as JSON instead; "": none
	logSize, logBackups                  int
	maxCPU                               string
	percent                              float64
	metrics                              string
	scraped                              netip.AddrPort
}

func newGuardRun(s cli.Streams) *cobra.Command {
	o := guardRun{folder: agent.RunDirectory, decoys: decoy.Directory}
	var btf string
	c := &cobra.Command{
		Use:   "run --policy FILE",
		Short: "Protect files and detect intruders by a policy, and print each denial and finding, until Ctrl-C (needs root)",
		Long: `Apply the sections of a policy: the kernel protects files and processes (protect, processes) and denies
connections (connections), and the process detects intruders (detect) and watches decoys (decoys). The
command prints each operation that is denied, or would be denied (mode: audit), and each finding. Protection
does not need the process: it goes on after the process ends, even after Ctrl-C or a crash, until
` + "`shunt guard stop`" + ` or the next boot. Detection ends with the process. Running the command again takes
the protection over.

On SIGHUP the command reads the file again, and the kernel and the process switch to it at once. A file
with faults changes nothing. A new section switches its feature on, and a removed section switches it off:
without rules that protect, protection ends. ` + "`shunt guard status`" + ` lists the features that are on.

For protection the kernel must let BPF programs decide (BPF LSM). If it does not, the first line names the
rules that are not enforced, and the reason. The command then exits with 1 if a rule has mode deny and the
policy does not have degraded: allow. With degraded: allow, opens of protected files wait for the process,
which refuses them (fanotify), and the first line names the operations that are not enforced; this protection
ends with the process. Otherwise the command only detects, and with nothing to detect it exits with 0.

With --max-cpu the process runs in a cgroup of its own with that limit. Near the limit, detection leaves out
events in the kernel, the most frequent first: it keeps one in 2, then one in 4, in the end none;
` + "`shunt guard status`" + ` says how many were left out. Protection uses no CPU time of the process. The limit is lifted while a policy is switched.

With --log, denials and findings go to a file as JSON, which is renamed when it is full.`,
		Example: `  shunt guard check guard.yaml
  sudo shunt guard run --policy guard.yaml
  sudo shunt guard run --policy guard.yaml --log /var/log/shunt-guard.json`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) (err error) {
			if err := cli.RequireOutput(o.output); err != nil {
				return err
			}
			if o.logSize < 1 || o.logBackups < 0 {
				return cli.UsageError{Err: errors.New("--logsize must be at least 1, and --logbackup cannot be negative")}
			}
			if o.scraped, err = listenAddress(o.metrics); err != nil {
				return cli.UsageError{Err: err}
			}
			if o.percent, err = percentOf(o.maxCPU); err != nil {
				return cli.UsageError{Err: err}
			}
			p, err := loadPolicy(s, o.file)
			if err != nil {
				return err
			}
			if o.types, err = tool.FindTypes(btf); err != nil {
				return err
			}
			if err := cli.RequireRoot("guard run", "puts programs into the kernel"); err != nil {
				return err
			}
			return runGuard(c, s, p, o)
		},
	}
	f := c.Flags()
	f.StringVar(&o.file, "policy", "", "the policy: a file, or a directory of *.yaml")
	f.StringVar(&o.cgroup, "cgroup", "", "detect and deny connections only in processes of this cgroup and of the cgroups below it: a folder of the second hierarchy")
	f.StringVar(&o.maxCPU, "max-cpu", "", "share of one CPU that the process may use, for example 3%; default: no limit")
	f.StringVar(&o.metrics, "metrics", "", "address and port at which Prometheus can get metrics, for example 127.0.0.1:9471; default: none")
	f.StringVar(&o.log, "log", "", "append denials and findings to this file as JSON, instead of printing them")
	f.IntVar(&o.logSize, "logsize", 100, "size in MiB at which the log is renamed and a new log begins")
	f.IntVar(&o.logBackups, "logbackup", 3, "number of renamed logs to keep, the newest; 0: all")
	tool.BTFFlag(c, &btf)
	cli.OutputFlag(c, &o.output)
	return c
}

// percentOf reads a share of one CPU, as 3%; "": 0, which is no limit.
func percentOf(text string) (float64, error) {
	if text == "" {
		return 0, nil
	}
	number, is := strings.CutSuffix(text, "%")
	percent, err := strconv.ParseFloat(number, 64)
	if !is || err != nil || !(percent > 0 && percent <= tool.PercentMax) {
		return 0, fmt.Errorf("--max-cpu %q: write percent of one CPU, for example 3%%", text)
	}
	return percent, nil
}

// teller writes the agent's lines, as text or as one JSON object a line.
func teller(w io.Writer, isJSON bool) func(agent.Line) error {
	lines := json.NewEncoder(w)
	return func(l agent.Line) error {
		switch {
		case !isJSON:
			_, err := fmt.Fprintln(w, l)
			return err
		case l.Attempt != nil:
			return lines.Encode(l.Attempt)
		default:
			return lines.Encode(detectionLine{Connection: l.Connection, Found: l.Found, Switched: l.Switched})
		}
	}
}

func runGuard(c *cobra.Command, s cli.Streams, p policy.Policy, o guardRun) (err error) {
	log, err := cli.NewLog(s.Err, "text", false)
	if err != nil {
		return err
	}
	notes := s.Out
	if o.output == "json" {
		notes = s.Err
	}
	tell := teller(s.Out, o.output == "json")
	if o.log != "" {
		file, openErr := tool.OpenRotated(o.log, 0o600, o.logSize, o.logBackups)
		if openErr != nil {
			return openErr
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		tell = teller(file, true)
	}
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, unix.SIGHUP) // before anybody can see that it is at work
	defer signal.Stop(hangup)
	var a *agent.Agent
	read := &reloads{}
	beginMetrics, endMetrics, err := openMetrics(c.Context(), o.scraped, log, func() (*metrics.Sample, error) { return guardSample(read, a) })
	if err != nil {
		return err
	}
	defer endMetrics()
	a, err = agent.Start(p, agent.Options{Root: kernel.DefaultPinRoot, Folder: o.folder, Decoys: o.decoys, Cgroup: o.cgroup, BTF: o.types, MaxCPU: o.percent, Limit: agent.LimitName, Log: log, Say: s.Err, Tell: tell})
	var refused *protect.Refusal
	if errors.As(err, &refused) {
		return notEnforced(s, p, refused)
	}
	if err != nil {
		return tool.Privileges(err)
	}
	if g := a.Gate(); g != nil {
		sayDegraded(s.Err, g.Status().Gaps, p, a.Refusal())
	} else if refused = a.Refusal(); refused != nil {
		if err := notEnforced(s, p, refused); err != nil || !p.Watches() {
			return errors.Join(err, a.Close())
		}
	}
	read.note(true)
	beginMetrics()
	sayBegins(notes, a, p)
	sayDecoys(notes, a.Status())
	if g := a.Guard(); g != nil {
		g.Warn(s.Err)
	}
	if _, err := systemd.SdNotify(false, systemd.SdNotifyReady); err != nil { // services that wait for it may begin
		log.Warn("cannot tell the service manager that the policy is in force", "error", err)
	}
	ctx, cancel := cli.UntilStopped(c.Context())
	defer cancel()
	reloaded := make(chan struct{})
	go func() {
		defer close(reloaded)
		reload(ctx, a, hangup, o.file, s.Err, read.note)
	}()
	err = a.Wait(ctx)
	cancel()
	<-reloaded // before the maps are closed
	endMetrics()
	protects, holds := a.Guard() != nil, a.Gate() != nil
	err = errors.Join(err, a.Close())
	sayEnds(notes, a.Status(), protects)
	if holds {
		fmt.Fprintln(notes, "Files are not protected any more: without BPF LSM, protection ends with this process.")
	}
	return err
}

// sayBegins prints the features that are on.
func sayBegins(w io.Writer, a *agent.Agent, p policy.Policy) {
	if g := a.Guard(); g != nil {
		begins := "protected from now on"
		if g.Adopted {
			begins = "protected without interruption"
		}
		fmt.Fprintf(w, "%s, %s: %s.\n", value.Counted(g.Files, "inode"), value.Counted(len(p.Enforced()), "rule"), begins)
		for _, r := range p.Enforced() {
			fmt.Fprintf(w, "  %s: %v\n", r.Name, r)
		}
		if g.Unheard > 0 {
			fmt.Fprintf(w, "%s while no `shunt guard run` was running; `shunt guard status` counts them\n", value.Counted(int(g.Unheard), "attempt"))
		}
	}
	if g := a.Gate(); g != nil {
		status := g.Status()
		fmt.Fprintf(w, "Opens of %s wait for this process, by %s.\n", value.Counted(status.Objects, "inode"), value.Counted(len(status.Rules), "rule"))
		printRules(w, status.Rules)
	}
	for _, f := range a.Status().Features {
		if f.Name == agent.ConnectionsName && f.On {
			fmt.Fprintf(w, "Connections: %s in force from now on.\n", value.Counted(f.Rules, "rule"))
		}
	}
	if n := len(p.Detection.Active()); n > 0 {
		fmt.Fprintf(w, "Detecting by %s.\n", value.Counted(n, "rule"))
	}
}

// sayEnds prints the counts at the end.
func sayEnds(w io.Writer, status agent.Status, protects bool) {
	lost := status.Alerts.Lost + status.Notes.Lost
	for _, f := range status.Features {
		lost += f.Lost
	}
	stays := "Nothing is detected any more."
	if protects {
		stays = "Protection goes on; `shunt guard stop` ends it."
	}
	for _, f := range status.Features {
		if f.Name == agent.ConnectionsName && f.On {
			stays += " Connections stay denied."
		}
	}
	fmt.Fprintf(w, "%d reported, %d lost. %s\n", status.Alerts.Told+status.Notes.Told, lost, stays)
}

// applier is an *agent.Agent.
type applier interface {
	Apply(policy.Policy) error
	Warn(io.Writer)
}

// reload loads the file again at each SIGHUP. A policy that cannot be loaded changes nothing.
func reload(ctx context.Context, g applier, asked <-chan os.Signal, file string, say io.Writer, note func(applied bool)) {
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
		note(err == nil)
		if err != nil {
			fmt.Fprintf(say, "reload %s: %v. The earlier policy stays in force\n", file, err)
			continue
		}
		fmt.Fprintf(say, "reloaded %s: %s\n", file, rulesText(p))
		g.Warn(say)
	}
}

// rulesText counts the rules by which a policy protects and detects.
func rulesText(p policy.Policy) string {
	text := "nothing is protected"
	if n := len(p.Enforced()); n > 0 {
		text = "protecting by " + value.Counted(n, "rule")
	}
	if n := len(p.Connections); n > 0 {
		text += ", connections by " + value.Counted(n, "rule")
	}
	if n := len(p.Detection.Active()); n > 0 {
		text += ", detecting by " + value.Counted(n, "rule")
	}
	if n := len(p.Decoys); n > 0 {
		text += ", watching decoys by " + value.Counted(n, "part")
	}
	return text
}

// sayDegraded begins with the operations that are not enforced, where only opens are.
func sayDegraded(w io.Writer, gaps []policy.Gap, p policy.Policy, refused *protect.Refusal) {
	fmt.Fprintln(w, gate.NotEnforced(gaps))
	if held := gate.Held(p.Enforced()); len(held) > 0 {
		fmt.Fprintf(w, "Enforced when a file is opened, by fanotify, as long as `shunt guard run` is running: %s.\n", strings.Join(held, "; "))
	}
	fmt.Fprintf(w, "why: %s\nwhat to do: %s.\n", refused.Reason, refused.Remedy)
}

// notEnforced begins with the rules that the user must not rely on. It is a fault if a rule has to deny, unless the
// policy allows that.
func notEnforced(s cli.Streams, p policy.Policy, refused *protect.Refusal) error {
	fmt.Fprintln(s.Err, "NOT PROTECTED: nothing of the policy is enforced on this kernel, and nothing was attached.")
	for _, r := range p.Enforced() {
		fmt.Fprintf(s.Err, "  %s is not enforced: %v\n", r.Name, r)
	}
	fmt.Fprintf(s.Err, "why: %s\nwhat to do: %s.\n", refused.Reason, refused.Remedy)
	if !p.MustEnforce() {
		return nil
	}
	fmt.Fprintln(s.Err, "With degraded: allow in the policy, this is not a failure.")
	return cli.ErrSilent
}

func newGuardStatus(s cli.Streams) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "status",
		Short: "Show what the guard protects and detects, since when, and how many events it reported and lost (needs root)",
		Long: `Show what the kernel protects, since when, and what ` + "`shunt guard run`" + ` does: which features are on, since
when, how many events they had, how many were lost, and how many alerts there were. It exits with 1 if
nothing is protected or denied, and nothing detected.`,
		Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := errors.Join(cli.RequireOutput(output), cli.RequireRoot("guard status", "reads maps of the kernel")); err != nil {
				return err
			}
			status, err := protect.Look(kernel.DefaultPinRoot)
			if err != nil {
				return err
			}
			denial, err := connect.Look(kernel.DefaultPinRoot)
			if err != nil {
				return err
			}
			running, err := agent.Ask(agent.RunDirectory)
			if err != nil {
				return err
			}
			opens, err := opensOf(running, agent.RunDirectory)
			if err != nil {
				return err
			}
			if output == "json" {
				err = cli.WriteJSON(s.Out, map[string]any{"protected": status != nil, "guard": status, "connections": denial, "agent": running, "opens": opens})
			} else {
				if status == nil {
					printOpens(s.Out, opens, time.Now())
				}
				printConnectionsStatus(s.Out, denial)
				printAllStatus(s.Out, status, running, time.Now())
			}
			if err == nil && status == nil && denial == nil && (running == nil || !running.IsOn()) {
				return cli.ErrSilent
			}
			return err
		},
	}
	cli.OutputFlag(c, &output)
	return c
}

// opensOf returns the protection by holding opens: of the agent at work, or of one that has ended; nil: there is none,
// and there was none.
func opensOf(running *agent.Status, folder string) (*gate.Status, error) {
	if running == nil {
		return gate.Look(folder)
	}
	return holding(running), nil
}

// holding returns the protection by holding opens that an agent gives; nil: none.
func holding(running *agent.Status) *gate.Status {
	if running == nil {
		return nil
	}
	for _, f := range running.Features {
		if f.Opens != nil {
			return f.Opens
		}
	}
	return nil
}

// printOpens begins with the operations that are not enforced, or with the time since when nothing is.
func printOpens(w io.Writer, opens *gate.Status, now time.Time) {
	switch {
	case opens == nil:
	case !opens.Ended.IsZero():
		how := "was ended"
		if opens.Killed {
			how = "was killed"
		}
		fmt.Fprintf(w, "PROTECTION ENDED at %s, %v ago: process %d, for which opens of files waited, %s. `shunt guard run` protects again.\n",
			opens.Ended.Format(time.DateTime), now.Sub(opens.Ended).Round(time.Second), opens.PID, how)
	default:
		fmt.Fprintln(w, gate.NotEnforced(opens.Gaps))
		fmt.Fprintf(w, "Opens of %s wait for process %d, for %v; %d denied, %d audited.\n", value.Counted(opens.Objects, "inode"), opens.PID, now.Sub(opens.Began).Round(time.Second), opens.Denied, opens.Audited)
		if opens.Waited > 0 {
			mean := time.Duration(opens.Took / float64(opens.Waited) * float64(time.Second))
			fmt.Fprintf(w, "%s waited, %v each on average.\n", value.Counted(int(opens.Waited), "open"), mean.Round(time.Microsecond))
		}
		if opens.Unsure > 0 {
			fmt.Fprintf(w, "For %s it was unknown whether the program reads or writes: each was refused if the rules forbid either.\n", value.Counted(int(opens.Unsure), "open"))
		}
		if opens.Late > 0 {
			fmt.Fprintf(w, "warning: %d opens were allowed without a judgement, because the answer was late\n", opens.Late)
		}
		if opens.Unread > 0 {
			fmt.Fprintf(w, "warning: shunt could not read %d new files or folders, or had no room for them; they are not protected: load the policy again\n", opens.Unread)
		}
		printRules(w, opens.Rules)
	}
}

func printAllStatus(w io.Writer, status *protect.Status, running *agent.Status, now time.Time) {
	if running != nil {
		for _, o := range running.Off {
			fmt.Fprintf(w, "SWITCHED OFF by hand: %s, for %v, by %v. Switch it on with `shunt guard feature enable %s`.\n", o.Name, now.Sub(o.Since).Round(time.Second), o.By, o.Name)
		}
	}
	if status != nil {
		printGuardStatus(w, status, now)
	} else if holding(running) == nil {
		fmt.Fprintln(w, "Nothing is protected: no program of the guard is attached.")
	}
	if running == nil {
		fmt.Fprintln(w, "Nothing is detected: no `shunt guard run` is running.")
		return
	}
	fmt.Fprintf(w, "Process %d has run for %v, and read its policy again %s.\n", running.PID, now.Sub(running.Began).Round(time.Second), value.Counted(int(running.Reloads), "time"))
	printBudget(w, running.Budget)
	for _, f := range running.Features {
		switch {
		case f.On:
			fmt.Fprintf(w, "  %s: on for %v, by %s; %d events, %d lost, %d missed, %s\n", f.Name, now.Sub(f.Since).Round(time.Second), value.Counted(f.Rules, "rule"),
				f.Events, f.Lost, f.Missed, value.Counted(int(f.Alerts), "alert"))
			for _, one := range f.Thinned {
				fmt.Fprintf(w, "    %s\n", thinnedText(one))
			}
			if f.Decoys != nil {
				printDecoyStatus(w, *f.Decoys, now)
			}
		case f.Failed():
			fmt.Fprintf(w, "  %s: NOT ENFORCED: %s\n", f.Name, f.Why)
		default:
			fmt.Fprintf(w, "  %s: off\n", f.Name)
		}
	}
	if running.Alerts.Lost+running.Notes.Lost > 0 {
		fmt.Fprintf(w, "warning: %d alerts and %d notes were not written, because the reader of the output, or the disk, was too slow\n", running.Alerts.Lost, running.Notes.Lost)
	}
}

func printBudget(w io.Writer, b *agent.Budget) {
	switch {
	case b == nil:
	case b.Cgroup != "":
		fmt.Fprintf(w, "It may use %v %% of a CPU, by the cgroup %s; it had to wait in %s of 100 ms.\n", b.MaxCPU, b.Cgroup, value.Counted(int(b.Throttled), "period"))
	default:
		fmt.Fprintf(w, "Its limit is %v %% of a CPU, but the kernel does not enforce it: %s\n", b.MaxCPU, b.Why)
	}
}

func thinnedText(t detect.Thinned) string {
	switch t.OneOf {
	case 0:
		return fmt.Sprintf("LEFT OUT to save CPU: all events of %s; %d so far", t.Type, t.LeftOut)
	case 1:
		return fmt.Sprintf("%d events of %s were left out to save CPU; none are now", t.LeftOut, t.Type)
	}
	return fmt.Sprintf("LEFT OUT to save CPU: all but one in %d events of %s; %d so far", t.OneOf, t.Type, t.LeftOut)
}

func printGuardStatus(w io.Writer, status *protect.Status, now time.Time) {
	ago := func(t time.Time) string { return now.Sub(t).Round(time.Second).String() }
	fmt.Fprintf(w, "Protected for %s, by %s at %s; the policy was loaded %s ago.\n", ago(status.Since), value.Counted(len(status.Rules), "rule"), value.Counted(status.Hooks, "hook"), ago(status.Loaded))
	if status.Listening {
		fmt.Fprintln(w, "`shunt guard run` is running.")
	} else {
		fmt.Fprintf(w, "No `shunt guard run` has run for %s. Files stay protected; start it again to get reports.\n", ago(status.Heard))
	}
	fmt.Fprintf(w, "%d denied, %d audited, %d of these reported to no process.\n", status.Denied, status.Audited, status.Unheard)
	if status.Missed > 0 {
		fmt.Fprintf(w, "warning: %d operations were not examined, because this kernel does not run a program while it already runs on the same CPU: use Linux 6.1.54 or later\n", status.Missed)
	}
	if status.Untrusted > 0 {
		fmt.Fprintf(w, "warning: %d processes were neither trusted nor protected, because there were too many: protect and trust fewer programs\n", status.Untrusted)
	}
	if status.Unrecord > 0 {
		fmt.Fprintf(w, "warning: %d new files are protected only by their folder, because there are too many: protect fewer\n", status.Unrecord)
	}
	printRules(w, status.Rules)
}

func printRules(w io.Writer, rules []policy.RuleStatus) {
	for _, r := range rules {
		fmt.Fprintf(w, "  %s: %s\n", r.Name, r.Text)
	}
}

func newGuardStop(s cli.Streams) *cobra.Command {
	return &cobra.Command{
		Use:   "stop",
		Short: "End the protection, and remove its programs and maps from the kernel (needs root)",
		Args:  cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := cli.RequireRoot("guard stop", "removes programs from the kernel"); err != nil {
				return err
			}
			running, err := protect.Running(kernel.DefaultPinRoot)
			if err != nil {
				return err
			}
			if running {
				return errors.New("a `shunt guard run` is running, and would go on without protecting anything: end it first")
			}
			if err := noAgent(agent.RunDirectory); err != nil {
				return err
			}
			was, err := protect.Stop(kernel.DefaultPinRoot)
			denied, denyErr := connect.Stop(kernel.DefaultPinRoot)
			_, noteErr := gate.Forget(agent.RunDirectory)
			if err = errors.Join(err, denyErr, noteErr); err != nil {
				return err
			}
			if !was && !denied {
				fmt.Fprintln(s.Out, "Nothing was protected.")
				return nil
			}
			fmt.Fprintln(s.Out, "Nothing is protected any more.")
			return nil
		},
	}
}
