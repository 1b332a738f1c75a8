package command

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/cli/tool"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/value"
)

// eventLineMax is the longest line of recorded events: an event has some 4 KB of paths and arguments.
const eventLineMax = 1 << 18

// detectionLine is one line of `shunt guard events -o json`, or of `shunt guard run -o json`: one of these.
type detectionLine struct {
	Connection *connect.Attempt `json:"connection,omitempty"`
	Found      *detect.Found    `json:"found,omitempty"`
	Event      *rule.Event      `json:"event,omitempty"`
	Counts     *detect.Counts   `json:"counts,omitempty"`
	Switched   *agent.Switched  `json:"switched,omitempty"`
}

func newGuardEvents(s cli.Streams) *cobra.Command {
	var file, cgroup, output, btf string
	var all bool
	var duration time.Duration
	c := &cobra.Command{
		Use:   "events",
		Short: "Report processes that act like intruders, by rules, until Ctrl-C (needs root)",
		Long: `Watch processes, and report each finding of a rule: of the built-in rules, or of the rules in a policy's
section detect. Each rule reports a chain of processes once, and not again for processes that it starts. Only
the tracepoints that the rules need are used; standard error names them at the start, with the events that
they do not see. Nothing stays in the kernel after the end. The summary says how many events were lost.

With kill or stop in the policy the process is ended or stopped as soon as its event is read; its actions
until then are not undone. Nothing is denied beforehand: for action: deny use ` + "`shunt guard run`" + `.

With -o json each line is an object: {"found": …}, or {"event": …} with --all. ` + "`shunt guard test`" + ` reads them.`,
		Example: `  sudo shunt guard events                                  # the built-in rules
  sudo shunt guard events --policy guard.yaml -o json      # the rules of a policy, for a log
  sudo shunt guard events --all -o json > recorded.json    # record all events, to try rules on them`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if duration < 0 {
				return cli.UsageError{Err: errors.New("--duration cannot be negative")}
			}
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			rules, err := detectionRules(s, file)
			if err != nil {
				return err
			}
			types, err := tool.FindTypes(btf)
			if err != nil {
				return err
			}
			ctx, cancel := tool.Context(c.Context())
			defer cancel()
			o := detect.Options{Rules: rules, Cgroup: cgroup, All: all, BTF: types}
			return tool.Privileges(watchEvents(ctx, s, o, duration, output == "json"))
		},
	}
	f := c.Flags()
	f.StringVar(&file, "policy", "", "the policy with the section detect; default: the built-in rules")
	f.StringVar(&cgroup, "cgroup", "", "watch only processes of this cgroup and of the cgroups below it: a folder of the second hierarchy")
	f.BoolVar(&all, "all", false, "print all events, also events that no rule finds")
	f.DurationVar(&duration, "duration", 0, "end after this time, for example 5m; default: at Ctrl-C")
	tool.BTFFlag(c, &btf)
	cli.OutputFlag(c, &output)
	return c
}

// detectionRules are those of the policy; without one, the built-in ones.
func detectionRules(s cli.Streams, file string) ([]rule.Rule, error) {
	if file == "" {
		return policy.Detection{IsOn: true}.Active(), nil
	}
	p, err := loadPolicy(s, file)
	if err != nil {
		return nil, err
	}
	rules := p.Detection.Active()
	if len(rules) == 0 {
		return nil, fmt.Errorf("%s has no rules that detect: write detect: {} under guard for the built-in rules", file)
	}
	return rules, nil
}

func watchEvents(ctx context.Context, s cli.Streams, o detect.Options, atMost time.Duration, isJSON bool) error {
	w, err := detect.Open(o)
	if err != nil {
		return err
	}
	defer w.Close() //nolint:errcheck // Run has reported all errors
	for _, r := range w.Sensors() {
		if r.Got == nil || r.Got.Loses != "" {
			fmt.Fprintf(s.Err, "%v\n", r)
		}
	}
	for _, blind := range detect.Blind {
		fmt.Fprintf(s.Err, "not seen: %s\n", blind)
	}
	fmt.Fprintf(s.Err, "%s, %s: watching.\n", value.Counted(len(o.Rules), "rule"), value.Counted(len(w.Sensors()), "sensor"))
	lines := json.NewEncoder(s.Out)
	tell := func(f detect.Found) error {
		if isJSON {
			return lines.Encode(detectionLine{Found: &f})
		}
		_, err := fmt.Fprintln(s.Out, f)
		return err
	}
	var each func(*rule.Event) error
	if o.All {
		each = func(e *rule.Event) error {
			if isJSON {
				return lines.Encode(detectionLine{Event: e})
			}
			_, err := fmt.Fprintln(s.Out, eventText(e))
			return err
		}
	}
	if atMost > 0 { // of watching: the sensors are at work by now
		var expire context.CancelFunc
		ctx, expire = context.WithTimeout(ctx, atMost)
		defer expire()
	}
	counts, err := w.Run(ctx, tell, each)
	fmt.Fprintf(s.Err, "%s reported, %d more for chains of processes that had been reported. %d events received, %d lost, %d runs missed.\n",
		value.Counted(int(counts.Told), "finding"), counts.Again, counts.Received, counts.Lost, counts.Missed)
	if isJSON {
		err = errors.Join(err, lines.Encode(detectionLine{Counts: &counts}))
	}
	return err
}

// eventText is an event in one line.
func eventText(e *rule.Event) string {
	object := e.Path
	switch {
	case e.Socket != nil:
		object = fmt.Sprintf("%s:%d", e.Socket.Remote, e.Socket.RemotePort)
	case e.Type == rule.Dup:
		object = fmt.Sprintf("%d: %s", e.FD, e.FDs[min(e.FD, 3)].Kind)
	case e.Type == rule.Ptrace:
		object = fmt.Sprintf("%s process %d", e.Request, e.Target)
	case e.Before != nil:
		object = fmt.Sprintf("%d/%d to %d/%d", e.Before.UID, e.Before.EUID, e.User.UID, e.User.EUID)
	}
	return fmt.Sprintf("%s event %s %s by %s, pid %d, user %d", e.Time.Format("15:04:05.000"), e.Type, event.Printable(object),
		event.Printable(e.Process.Program), e.Process.PID, e.User.UID)
}

func newGuardTest(s cli.Streams) *cobra.Command {
	var file, output string
	c := &cobra.Command{
		Use:   "test RULE [EVENTS]",
		Short: "Try a rule on recorded events; no root",
		Long: `Read events that "shunt guard events --all -o json" has printed, from a file or from standard input, and print
each event that the rule finds, even several of one chain of processes. No action is taken. The command exits
with 1 if the rule finds none.`,
		Example: `  sudo shunt guard events --all -o json > recorded.json
  shunt guard test reverse-shell recorded.json
  shunt guard test mine --policy guard.yaml recorded.json`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return cli.UsageError{Err: errors.New("name a rule, and a file of events or none for standard input")}
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			rules := rule.Builtin()
			if file != "" {
				p, err := loadPolicy(s, file)
				if err != nil {
					return err
				}
				rules = append(rules, p.Detection.Rules...)
			}
			i := slices.IndexFunc(rules, func(r rule.Rule) bool { return r.Name == args[0] })
			if i < 0 {
				return unknownRule(args[0], rules, file)
			}
			events, name := s.In, "standard input"
			if len(args) == 2 {
				f, err := os.Open(args[1])
				if err != nil {
					return fmt.Errorf("read the events: %w", err)
				}
				defer f.Close() //nolint:errcheck // only read
				events, name = f, args[1]
			}
			return tryRule(s, &rules[i], events, name, output == "json")
		},
	}
	c.Flags().StringVar(&file, "policy", "", "a policy with the rule, if the rule is not built in")
	cli.OutputFlag(c, &output)
	return c
}

func unknownRule(name string, rules []rule.Rule, file string) error {
	var names []string
	for _, r := range rules {
		names = append(names, r.Name)
	}
	instead := "`shunt guard rules` lists the built-in rules"
	if near := config.Nearest(name, names); near != "" {
		instead = fmt.Sprintf("did you mean %s?", near)
	}
	if file == "" {
		instead += " A rule of your own needs --policy FILE"
	}
	return fmt.Errorf("there is no rule %q: %s", name, instead)
}

func tryRule(s cli.Streams, r *rule.Rule, events io.Reader, name string, isJSON bool) error {
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, eventLineMax)
	number, tried, found := 0, 0, 0
	for lines.Scan() {
		number++
		var line detectionLine
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return fmt.Errorf("line %d of %s is not an event of `shunt guard events -o json`: %w", number, name, err)
		}
		if line.Event == nil {
			continue
		}
		tried++
		if !r.Holds(line.Event) {
			continue
		}
		found++
		f := detect.Found{Rule: r.Name, Severity: r.Severity, Mitre: r.Mitre, Action: r.Action, Text: r.Text(line.Event), Event: line.Event}
		if isJSON {
			if err := json.NewEncoder(s.Out).Encode(detectionLine{Found: &f}); err != nil {
				return err
			}
		} else if _, err := fmt.Fprintln(s.Out, f); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read the events, after line %d of %s: %w", number, name, err)
	}
	if tried == 0 {
		return fmt.Errorf("there are no events in %s: record some with `shunt guard events --all -o json`", name)
	}
	fmt.Fprintf(s.Err, "%s finds %d of %s.\n", r.Name, found, value.Counted(tried, "event"))
	if found == 0 {
		return cli.ErrSilent
	}
	return nil
}

func newGuardRules(s cli.Streams) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "rules",
		Short: "List the built-in rules that detect; no root",
		Args:  cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			if output == "json" {
				all := []map[string]any{}
				for _, r := range rule.Builtin() {
					all = append(all, map[string]any{"name": r.Name, "doc": r.Doc, "on": r.On, "if": r.If, "severity": r.Severity, "mitre": r.Mitre, "off": r.IsOff, "noise": r.Noise})
				}
				return cli.WriteJSON(s.Out, map[string]any{"rules": all})
			}
			w := tabwriter.NewWriter(s.Out, 0, 0, 2, ' ', 0)
			for _, r := range rule.Builtin() {
				state := "on"
				if r.IsOff {
					state = "off"
				}
				doc := r.Doc
				if r.Noise != "" {
					doc += "; so do " + r.Noise
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", r.Name, state, r.Severity, strings.Join(r.Mitre, ","), doc)
			}
			return w.Flush()
		},
	}
	cli.OutputFlag(c, &output)
	return c
}

func newGuardFields(s cli.Streams) *cobra.Command {
	return &cobra.Command{
		Use:   "fields",
		Short: "List the fields that conditions of rules can use; no root",
		Args:  cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			w := tabwriter.NewWriter(s.Out, 0, 0, 2, ' ', 0)
			for _, f := range rule.Fields {
				of := "all"
				if f.Of != nil {
					of = strings.Join(f.Of, ", ")
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", f.Name, f.Kind, of, f.Doc)
			}
			return w.Flush()
		},
	}
}
