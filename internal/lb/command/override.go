package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/spf13/cobra"
)

func newOverride(s cli.Streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "override",
		Short: "List or end overrides: the drains, weights and health that operators have set",
		Long: `An override changes what the configuration says about a backend: it drains the backend, gives it
another weight, or sets it up or down. An override survives reloads and restarts. It ends when an
operator clears it, or when the backend leaves the configuration. ` + "`shunt backend drain`,\n`weight` and `health`" + ` set overrides.`,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return cli.UsageError{Err: fmt.Errorf("there is no command `override %s`; there are list and clear", args[0])}
			}
			return c.Help()
		},
	}
	c.AddCommand(newOverrideList(s), newOverrideClear(s))
	return c
}

func newOverrideList(s cli.Streams) *cobra.Command {
	var t cli.Target
	var output string
	c := &cobra.Command{
		Use:   "list",
		Short: "List every override: its backend, its value, who set it and when",
		Args:  cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := errors.Join(cli.RequireOutput(output), t.Check()); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(c.Context(), cli.AnswerTimeout)
			defer cancel()
			var overrides []*shuntv1.Override
			err := t.Read(c, func(c *control.Client) (err error) {
				overrides, err = c.Overrides(ctx)
				return err
			})
			if err != nil {
				return err
			}
			if output == "json" {
				return cli.WriteMessages(s.Out, overrides)
			}
			printOverrides(s.Out, overrides)
			return nil
		},
	}
	t.Flags(c)
	cli.OutputFlag(c, &output)
	return c
}

func printOverrides(w io.Writer, overrides []*shuntv1.Override) {
	if len(overrides) == 0 {
		fmt.Fprintln(w, "There are no overrides: every backend is as the configuration says.")
		return
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "BACKEND\tOVERRIDE\tVALUE\tSET BY\tSINCE")
	for _, o := range overrides {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", o.Backend, o.Kind, overrideValue(o), authorText(o), o.Since.AsTime().Local().Format(time.DateTime))
	}
	_ = t.Flush()
}

// overrideValue is the value of an override, without its kind.
func overrideValue(o *shuntv1.Override) string {
	switch {
	case o.Weight != nil:
		return fmt.Sprint(o.GetWeight())
	case o.Health != nil:
		return o.GetHealth()
	case o.Deadline != nil:
		return "until " + o.Deadline.AsTime().Local().Format(time.DateTime)
	}
	return "without a deadline"
}

// authorText is "alice (uid 0) with shunt".
func authorText(o *shuntv1.Override) string {
	text := fmt.Sprintf("%s (uid %d)", o.By, o.Uid)
	if o.Client != "" {
		text += " with " + o.Client
	}
	return text
}

func newOverrideClear(s cli.Streams) *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use:   "clear BACKEND [drain|weight|health]...",
		Short: "End overrides, so that the values in the file apply again",
		Long: `End all overrides of a backend, or only the kinds that are named. With --all, end the overrides
of every backend. The values in the file then apply again. BACKEND is its name, ADDRESS or
ADDRESS:PORT.`,
		Args: func(_ *cobra.Command, args []string) error {
			kinds := args
			if !all {
				if len(args) == 0 {
					return cli.UsageError{Err: errors.New("name the backend whose overrides are to end, or give --all; `shunt override list` shows them")}
				}
				kinds = args[1:]
			}
			for _, kind := range kinds {
				if !slices.Contains(state.Kinds, state.Kind(kind)) {
					return cli.UsageError{Err: fmt.Errorf("there is no override %q; there are drain, weight and health", kind)}
				}
			}
			return nil
		},
	}
	overriding(s, c, func(ctx context.Context, client *control.Client, args []string) (*shuntv1.OverrideResponse, string, error) {
		request := &shuntv1.ClearOverridesRequest{All: all, Kinds: args}
		if !all {
			request.Backend, request.Kinds = args[0], args[1:]
		}
		result, err := client.Clear(ctx, request)
		if err == nil && len(result.Backends) == 0 {
			result.Backends = []string{"all backends"}
			return result, "there was no override to end", nil
		}
		what := "no override any more"
		if len(request.Kinds) > 0 {
			what = "no override of its " + strings.Join(request.Kinds, " or ") + " any more"
		}
		return result, what, err
	})
	c.Flags().BoolVar(&all, "all", false, "end the overrides of every backend")
	return c
}
