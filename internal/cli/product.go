package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/control"
)

// ShownProduct is a product that ends with the daemon, so a command without a daemon has nothing to show.
type ShownProduct struct {
	Name string // its key in the configuration
	It   string // the part that could not be started, in a message
	Show string // the purpose of its commands
	Page string // of the guide
}

// ProductReading are the flags of a command that shows a product.
type ProductReading struct {
	Of ShownProduct
	Target
	Output string
}

// Flags has a command take the flags.
func (o *ProductReading) Flags(c *cobra.Command) {
	o.Target.Flags(c)
	OutputFlag(c, &o.Output)
}

// Status asks the daemon. The error says why it has no information about the product.
func (o *ProductReading) Status(ctx context.Context, c *cobra.Command) (*shuntv1.GetStatusResponse, error) {
	if err := errors.Join(RequireOutput(o.Output), o.Check()); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, AnswerTimeout)
	defer cancel()
	var st *shuntv1.GetStatusResponse
	err := o.Read(c, func(c *control.Client) (err error) {
		st, err = c.Status(ctx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.Of.Show, err)
	}
	for _, p := range st.GetDaemon().GetProducts() {
		if p.Name == o.Of.Name && p.Failed != "" {
			return nil, fmt.Errorf("%s: shunt could not start %s, and tries again: %s", o.Of.Show, o.Of.It, p.Failed)
		}
		if p.Name == o.Of.Name {
			return st, nil
		}
	}
	return nil, fmt.Errorf("%s: the configuration %s has no key %s; %s says how to write one", o.Of.Show, st.GetDaemon().GetConfigPath(), o.Of.Name, o.Of.Page)
}

// OneOf checks the arguments of a command that takes the name of one thing; list is the command that lists the
// names.
func OneOf(thing, list string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return UsageError{Err: fmt.Errorf("name one %s; `%s` lists them", thing, list)}
		}
		return nil
	}
}
