package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/control"
)

// shownProduct is a product that ends with the daemon, so that without a daemon there is nothing to show.
type shownProduct struct {
	name string // its key in the configuration
	it   string // what could not be started, in a message
	show string // what its commands do
	page string // of the guide
}

// productReading are the flags of a command that shows a product.
type productReading struct {
	of shownProduct
	target
	output string
}

func (o *productReading) flags(c *cobra.Command) {
	o.target.flags(c)
	outputFlag(c, &o.output)
}

// status asks the daemon. The error says why it has no information about the product.
func (o *productReading) status(ctx context.Context, c *cobra.Command) (*shuntv1.GetStatusResponse, error) {
	if err := errors.Join(requireOutput(o.output), o.check()); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	var st *shuntv1.GetStatusResponse
	err := o.read(c, func(c *control.Client) (err error) {
		st, err = c.Status(ctx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.of.show, err)
	}
	for _, p := range st.GetDaemon().GetProducts() {
		if p.Name == o.of.name && p.Failed != "" {
			return nil, fmt.Errorf("%s: shunt could not start %s, and tries again: %s", o.of.show, o.of.it, p.Failed)
		}
		if p.Name == o.of.name {
			return st, nil
		}
	}
	return nil, fmt.Errorf("%s: the configuration %s has no key %s; %s says how to write one", o.of.show, st.GetDaemon().GetConfigPath(), o.of.name, o.of.page)
}

// oneOf checks the arguments of a command that takes the name of one thing; list is the command that lists the
// names.
func oneOf(thing, list string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usageError{fmt.Errorf("name one %s; `%s` lists them", thing, list)}
		}
		return nil
	}
}
