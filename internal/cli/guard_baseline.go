package cli

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/guard/baseline"
	"github.com/shunt-lb/shunt/internal/value"
)

func newGuardBaseline(s streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "baseline COMMAND",
		Short: "Compare a system's settings with a baseline, change them, and take that back",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("there is no command %q of `shunt guard baseline`", args[0])}
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newBaselineCheck(s))
	return c
}

// baselineFlags are those of every command of the baseline.
type baselineFlags struct{ root, template, output string }

func (f *baselineFlags) add(c *cobra.Command, template bool) {
	c.Flags().StringVar(&f.root, "root", "/", "the system's root folder; nothing outside of it is read")
	if template {
		c.Flags().StringVar(&f.template, "template", baseline.Debian, "what to compare with: debian, or a file that changes it")
	}
	outputFlag(c, &f.output)
}

// items are the template's. What is wrong with it is told.
func (f *baselineFlags) items(s streams) ([]baseline.Item, error) {
	items, faults, err := baseline.Load(f.template)
	if err != nil {
		return nil, fmt.Errorf("read the template: %w", err)
	}
	if err := config.Render(s.err, faults); err != nil {
		return nil, err
	}
	if config.HasErrors(faults) {
		return nil, errSilent
	}
	return items, nil
}

func newBaselineCheck(s streams) *cobra.Command {
	var f baselineFlags
	var all bool
	c := &cobra.Command{
		Use:   "check",
		Short: "Say which settings of a system differ from the baseline; changes nothing",
		Long: `Compare the files of a system with a template, and list what differs, with what is expected and how it would
be repaired. Nothing is changed, and no program of the system is run, so it can be a tree that is not running.
Without root, what cannot be read is said to be unknown. It exits with 1 if an item fails or cannot be told.`,
		Example: `  shunt guard baseline check
  shunt guard baseline check --root /srv/image --template own.yaml -o json`,
		Args: noArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := requireOutput(f.output); err != nil {
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
				err = writeJSON(s.out, map[string]any{"ok": ok, "root": f.root, "counts": counts, "items": results})
			} else {
				printBaseline(s.out, results, counts, all)
			}
			if err == nil && !ok {
				return errSilent
			}
			return err
		},
	}
	c.Flags().BoolVar(&all, "all", false, "also list what passes and what is not applicable")
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
	fmt.Fprintf(w, "%s: %d pass, %d fail, %d are not applicable, of %d it cannot be told.\n", value.Counted(len(results), "item"),
		counts[baseline.Passes], counts[baseline.Fails], counts[baseline.NotApplicable], counts[baseline.CannotTell])
}
