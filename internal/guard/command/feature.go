package command

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/agent"
)

func newGuardFeature(s cli.Streams, folder string) *cobra.Command {
	c := cli.Group(&cobra.Command{
		Use:   "feature COMMAND",
		Short: "Switch protection, connections, detection, decoys or single rules off and on while the guard runs (needs root)",
	})
	c.AddCommand(newFeatureList(s, folder),
		newFeatureSwitch(s, folder, "enable", "Switch a feature or a rule on again that was switched off by hand (needs root)", true),
		newFeatureSwitch(s, folder, "disable", "Switch a feature or a rule off, until it is enabled or the guard ends (needs root)", false))
	return c
}

func newFeatureList(s cli.Streams, folder string) *cobra.Command {
	var output string
	var rules bool
	c := &cobra.Command{
		Use:   "list",
		Short: "List features, and whether they are on (needs root)",
		Args:  cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := errors.Join(cli.RequireOutput(output), cli.RequireRoot("guard feature list", "asks the guard's process")); err != nil {
				return err
			}
			status, err := agent.Ask(folder)
			if err != nil {
				return err
			}
			if status == nil {
				return agent.ErrNoAgent
			}
			all := switchesOf(status, rules)
			if output == "json" {
				return cli.WriteJSON(s.Out, map[string]any{"features": all})
			}
			return printSwitches(s.Out, all)
		},
	}
	c.Flags().BoolVar(&rules, "rules", false, "also list the rules of the policy, as FEATURE/RULE")
	cli.OutputFlag(c, &output)
	return c
}

// switchState is a feature, or a rule as FEATURE/RULE, in the list.
type switchState struct {
	Name string     `json:"name"`
	On   bool       `json:"on"`
	Off  *agent.Off `json:"off,omitempty"` // it was switched off by hand
	Why  string     `json:"why,omitempty"` // it is off for another reason
}

func switchesOf(status *agent.Status, rules bool) (all []switchState) {
	left := slices.Clone(status.Off)
	add := func(name string, on bool, why string) {
		state := switchState{Name: name, On: on}
		if i := slices.IndexFunc(left, func(o agent.Off) bool { return o.Name == name }); i >= 0 {
			off := left[i]
			state.On, state.Off = false, &off
			left = slices.Delete(left, i, i+1)
		} else if !on {
			state.Why = why
		}
		all = append(all, state)
	}
	for _, f := range status.Features {
		why := f.Why
		if why == "" && len(f.Names) > 0 {
			why = "all its rules are switched off"
		} else if why == "" {
			why = "the policy has no rules for it"
		}
		add(f.Name, f.On, why)
		for _, rule := range f.Names {
			name := f.Name + "/" + rule
			isOff := slices.ContainsFunc(left, func(o agent.Off) bool { return o.Name == name })
			if rules || isOff {
				add(name, f.On, "the feature is off")
			}
		}
	}
	for _, off := range left {
		all = append(all, switchState{Name: off.Name, Off: &off})
	}
	return all
}

func printSwitches(w io.Writer, all []switchState) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, one := range all {
		text := "on"
		switch {
		case one.Off != nil:
			text = fmt.Sprintf("OFF by hand, since %s, by %v", one.Off.Since.Format("2006-01-02 15:04:05"), one.Off.By)
		case !one.On:
			text = "off: " + one.Why
		}
		fmt.Fprintf(table, "%s\t%s\n", one.Name, text)
	}
	return table.Flush()
}

func newFeatureSwitch(s cli.Streams, folder, verb, short string, on bool) *cobra.Command {
	return &cobra.Command{
		Use:   verb + " NAME",
		Short: short,
		Long: short + `.

NAME is protection, connections, detection, decoys, or a rule of the policy as protection/RULE, connections/RULE or
detection/RULE. A feature or rule that is switched off stays off when the policy is read again (SIGHUP);
` + "`shunt guard status`" + ` names it first, and an alert reports it. The next ` + "`shunt guard run`" + ` follows its policy
alone. Protection that is switched off leaves no program in the kernel; decoys that are switched off are
removed. If switching fails, nothing has changed.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return cli.UsageError{Err: errors.New("name one feature or rule; `shunt guard feature list --rules` lists them")}
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if err := cli.RequireRoot("guard feature "+verb, "asks the guard's process"); err != nil {
				return err
			}
			changed, err := agent.AskToSwitch(folder, args[0], on)
			if err != nil {
				return err
			}
			word, still := "off", ""
			if on {
				word = "on"
			}
			if !changed {
				still = "already "
			}
			fmt.Fprintf(s.Out, "%s is %sswitched %s.\n", args[0], still, word)
			if !on {
				return nil
			}
			status, err := agent.Ask(folder)
			if err == nil && status != nil {
				warnNotAtWork(s.Err, switchesOf(status, true), args[0])
			}
			return err
		},
	}
}

// warnNotAtWork prints why a feature or rule does nothing though nobody has switched it off.
func warnNotAtWork(w io.Writer, all []switchState, name string) {
	for _, one := range all {
		if one.Name == name && !one.On {
			fmt.Fprintf(w, "warning: %s does not work: %s\n", name, one.Why)
		}
	}
}
