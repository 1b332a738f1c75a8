package command

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/guard/baseline"
	"github.com/shunt-lb/shunt/internal/value"
)

func newGuardBaseline(s cli.Streams) *cobra.Command {
	c := cli.Group(&cobra.Command{
		Use:   "baseline COMMAND",
		Short: "Compare a system's settings with a baseline, change them, and roll the change back",
	})
	c.AddCommand(newBaselineCheck(s), newBaselineFix(s), newBaselineRollback(s))
	return c
}

// baselineFlags are those of every command of the baseline.
type baselineFlags struct{ root, template, output string }

func (f *baselineFlags) add(c *cobra.Command, template bool) {
	c.Flags().StringVar(&f.root, "root", "/", "the system's root folder; nothing outside of it is read")
	if template {
		c.Flags().StringVar(&f.template, "template", baseline.Debian, "the template: debian, or a file that changes it")
	}
	cli.OutputFlag(c, &f.output)
}

// items are the template's. Faults of the template are printed.
func (f *baselineFlags) items(s cli.Streams) ([]baseline.Item, error) {
	items, faults, err := baseline.Load(f.template)
	if err != nil {
		return nil, fmt.Errorf("read the template: %w", err)
	}
	if err := config.Render(s.Err, faults); err != nil {
		return nil, err
	}
	if config.HasErrors(faults) {
		return nil, cli.ErrSilent
	}
	return items, nil
}

func newBaselineCheck(s cli.Streams) *cobra.Command {
	var f baselineFlags
	var all bool
	c := &cobra.Command{
		Use:   "check",
		Short: "Show which settings of a system differ from the baseline; changes nothing",
		Long: `Compare the files of a system with a template, and list the items that differ, each with the expected value
and its repair. Nothing is changed, and no program of the system is run, so the system need not be running.
Without root, an item whose files cannot be read is reported as unknown. The command exits with 1 if an item
fails or is unknown.`,
		Example: `  shunt guard baseline check
  shunt guard baseline check --root /srv/image --template own.yaml -o json`,
		Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := cli.RequireOutput(f.output); err != nil {
				return err
			}
			items, err := f.items(s)
			if err != nil {
				return err
			}
			results, err := baseline.Check(f.root, items)
			if err != nil {
				return err
			}
			counts := map[string]int{}
			for _, r := range results {
				counts[r.Status]++
			}
			ok := counts[baseline.Fails]+counts[baseline.CannotTell] == 0
			if f.output == "json" {
				err = cli.WriteJSON(s.Out, map[string]any{"ok": ok, "root": f.root, "counts": counts, "items": results})
			} else {
				printBaseline(s.Out, results, counts, all)
			}
			if err == nil && !ok {
				return cli.ErrSilent
			}
			return err
		},
	}
	c.Flags().BoolVar(&all, "all", false, "also list items that pass or are not applicable")
	f.add(c, true)
	return c
}

func printBaseline(w io.Writer, results []baseline.Result, counts map[string]int, all bool) {
	for _, section := range baseline.Sections {
		title := false
		for _, r := range results {
			if r.Section != section.Word || !all && r.Status != baseline.Fails && r.Status != baseline.CannotTell {
				continue
			}
			if !title {
				fmt.Fprintf(w, "%s (GB/T 22239-2019 %s)\n", section.Title, section.Clause)
				title = true
			}
			fmt.Fprintf(w, "  %s: %s: %s\n    found     %s\n", r.Status, r.ID, r.Title, r.Found)
			if r.Status == baseline.Fails || r.Status == baseline.CannotTell {
				fmt.Fprintf(w, "    expected  %s\n", r.Expected)
			}
			if r.Remedy != "" {
				fmt.Fprintf(w, "    remedy    %s\n", r.Remedy)
			}
		}
	}
	fmt.Fprintf(w, "%s: %d pass, %d fail, %d are not applicable, %d are unknown.\n", value.Counted(len(results), "item"),
		counts[baseline.Passes], counts[baseline.Fails], counts[baseline.NotApplicable], counts[baseline.CannotTell])
}

func newBaselineFix(s cli.Streams) *cobra.Command {
	var f baselineFlags
	var journal string
	var apply bool
	c := &cobra.Command{
		Use:   "fix [ITEM…]",
		Short: "Show the changes that would make a system pass; with --apply, make them",
		Long: `Show the changes that repair all failing items, or only the named items. Nothing is changed without --apply.
With --apply, the command first writes the present state of every object that it will change to a journal, so
that rollback can restore it, even after a crash. Running services are not reloaded: most settings take effect
when a service starts again, or at the next boot. The command exits with 1 if an item needs a person, or could
not be repaired.`,
		Example: `  shunt guard baseline fix
  sudo shunt guard baseline fix --apply ssh-max-auth-tries
  sudo shunt guard baseline rollback`,
		RunE: func(_ *cobra.Command, args []string) error {
			if err := cli.RequireOutput(f.output); err != nil {
				return err
			}
			items, err := f.items(s)
			if err != nil {
				return err
			}
			plan, err := baseline.NewPlan(f.root, items, args)
			if err != nil {
				return err
			}
			defer plan.Close() //nolint:errcheck // every write was synced
			name, diff := "", plan.Diff()
			if apply {
				if name, err = plan.Apply(journal); err != nil {
					return err
				}
			}
			if f.output == "json" {
				err = cli.WriteJSON(s.Out, map[string]any{"applied": apply, "journal": name, "diff": diff, "items": cli.NonNil(plan.Outcomes)})
			} else {
				printFix(s.Out, plan, diff, name, apply)
			}
			for _, o := range plan.Outcomes {
				if err == nil && (o.ByHand != "" || o.Error != "") {
					return cli.ErrSilent
				}
			}
			return err
		},
	}
	c.Flags().BoolVar(&apply, "apply", false, "make the changes (as the owner of the files, which is root)")
	journalFlag(c, &journal)
	f.add(c, true)
	return c
}

func journalFlag(c *cobra.Command, journal *string) {
	c.Flags().StringVar(journal, "journal", baseline.DefaultJournal, "folder of the journals")
}

func printFix(w io.Writer, plan *baseline.Plan, diff, journal string, apply bool) {
	fmt.Fprint(w, diff)
	fixed, byHand, failed := 0, 0, 0
	for _, o := range plan.Outcomes {
		switch {
		case o.Error != "":
			failed++
			fmt.Fprintf(w, "not fixed: %s: %s\n", o.ID, o.Error)
		case o.ByHand != "":
			byHand++
			fmt.Fprintf(w, "by hand: %s: %s\n", o.ID, o.ByHand)
		default:
			fixed++
		}
	}
	switch {
	case len(plan.Outcomes) == 0:
		fmt.Fprintln(w, "No item fails: there is nothing to change.")
	case !apply:
		fmt.Fprintf(w, "%s would be changed to repair %s; %d need a person. Nothing was changed: --apply makes the changes.\n",
			value.Counted(plan.Changes(), "object"), value.Counted(fixed, "item"), byHand)
	case journal == "":
		fmt.Fprintf(w, "Nothing could be changed; %s a person.\n", needs(byHand))
	default:
		fmt.Fprintf(w, "%s repaired, %d not, %s a person. Journal %s; `shunt guard baseline rollback` restores the earlier state.\n", value.Counted(fixed, "item"), failed, needs(byHand), journal)
	}
}

func needs(n int) string {
	if n == 1 {
		return "1 item needs"
	}
	return fmt.Sprintf("%d items need", n)
}

func newBaselineRollback(s cli.Streams) *cobra.Command {
	var f baselineFlags
	var journal string
	c := &cobra.Command{
		Use:   "rollback",
		Short: "Undo the newest fix: restore contents, permissions, owners, attributes, times",
		Long: `Undo the changes of the newest fix of this root that is not rolled back yet. An object that was changed since
the fix is left alone and named; the exit status is then 1, and the journal stays. After a crash the command
can be repeated.`,
		Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := cli.RequireOutput(f.output); err != nil {
				return err
			}
			r, err := baseline.RollBack(f.root, journal)
			if err != nil {
				return err
			}
			switch {
			case f.output == "json":
				err = cli.WriteJSON(s.Out, map[string]any{"rollback": r})
			case r == nil:
				fmt.Fprintf(s.Out, "%s has no journal of %s that is left to roll back.\n", journal, f.root)
			default:
				for _, path := range r.Restored {
					fmt.Fprintf(s.Out, "restored %s\n", path)
				}
				for _, left := range r.Left {
					fmt.Fprintf(s.Out, "left %s\n", left)
				}
				fmt.Fprintf(s.Out, "Journal %s: %s restored, %d left.\n", r.Journal, value.Counted(len(r.Restored), "object"), len(r.Left))
			}
			if err == nil && (r == nil || len(r.Left) > 0) {
				return cli.ErrSilent
			}
			return err
		},
	}
	journalFlag(c, &journal)
	f.add(c, false)
	return c
}
