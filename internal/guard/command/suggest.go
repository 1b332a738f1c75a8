package command

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/suggest"
)

func newGuardSuggest(s cli.Streams) *cobra.Command {
	var file, output string
	c := &cobra.Command{
		Use:   "suggest --policy FILE [EVENTS]",
		Short: "Propose which programs a policy should trust, and where programs may connect, from the events of its rules; no root",
		Long: `Read the output of "shunt guard run -o json", from a file or from standard input, and print the policy with
the audited programs added: each rule then trusts the programs whose operations it forbade. Standard error
names the programs and their operations, and says why some are not added. Rules for connections get the
audited connections as exceptions. Check each of them before you use the policy: if an intruder was audited, the policy would allow the
intruder's operations. With -o json, standard output has the programs and operations instead of a policy.`,
		Example: `  sudo shunt guard run --policy guard.yaml -o json > events.json
  shunt guard suggest --policy guard.yaml events.json > new.yaml`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return cli.UsageError{Err: errors.New("name one file of events, or none for standard input")}
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			p, err := loadPolicy(s, file)
			if err != nil {
				return err
			}
			events, name := s.In, "standard input"
			if len(args) == 1 {
				f, err := os.Open(args[0])
				if err != nil {
					return fmt.Errorf("read the events: %w", err)
				}
				defer f.Close() //nolint:errcheck // only read
				events, name = f, args[0]
			}
			found, err := suggest.Read(p, events)
			if err != nil {
				return fmt.Errorf("suggest a policy from %s: %w", name, err)
			}
			if output == "json" {
				return cli.WriteJSON(s.Out, found)
			}
			if err := found.Print(s.Err); err != nil {
				return err
			}
			_, err = io.WriteString(s.Out, found.Policy.YAML())
			return err
		},
	}
	c.Flags().StringVar(&file, "policy", "", "the policy that was in force when the events were recorded: a file, or a directory of *.yaml")
	cli.OutputFlag(c, &output)
	return c
}
