package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/status"
	"github.com/shunt-lb/shunt/internal/node"
)

// reading are the flags of a command that shows an instance.
type reading struct {
	cli.Target
	output  string
	service string // only this one; empty: all
	all     bool   // every row, however many
}

func (o *reading) flags(c *cobra.Command) {
	o.Target.Flags(c)
	cli.OutputFlag(c, &o.output)
	c.Flags().StringVar(&o.service, "service", "", "show only this service and its backends")
	c.Flags().BoolVar(&o.all, "all", false, fmt.Sprintf("show every row; otherwise text shows at most %d rows of a table", cli.RowsMax))
}

func newStatus(s cli.Streams, others []cli.Product) *cobra.Command {
	var o reading
	var summary bool
	c := &cobra.Command{
		Use:   "status",
		Short: "Show services, their backends, counters and faults; also works without the daemon",
		Long: fmt.Sprintf(`Show interfaces, services with their backends, counters, and faults. If no daemon runs, the
command reads them from the maps, which needs root.

SLOTS, SHARE and OPEN are current values. OPEN counts connections through NAT that are not
closed, and UDP conversations. With direct return shunt does not know them ("-"). FLOWS, PACKETS and
BYTES are totals since the data plane was loaded. OPEN and the totals of a backend cover all
services that share the backend. If there are more than %d backends, each service has one row,
unless --service or --all is given.`, cli.RowsMax),
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			st, elsewhere, err := o.status(c)
			if err != nil {
				return err
			}
			if o.output == "json" {
				if summary {
					withoutBackends(st)
				}
				err = cli.WriteMessage(s.Out, st)
			} else {
				printStatus(s.Out, st, elsewhere, rows{summary: summary, all: o.all, others: others})
			}
			if err == nil && !st.Forwarding && !works(st) {
				err = cli.ErrSilent
			}
			return err
		},
	}
	o.flags(c)
	c.Flags().BoolVar(&summary, "summary", false, "show one row for each service, without backends")
	return c
}

// works reports whether a daemon runs its products, the balancer not being among them.
func works(st *shuntv1.GetStatusResponse) bool {
	all := st.GetDaemon().GetProducts()
	return len(all) > 0 && !slices.ContainsFunc(all, func(p *shuntv1.Product) bool { return p.Failed != "" })
}

// status returns the state to show, of the requested service. elsewhere: there has never been a daemon at this
// socket.
func (o *reading) status(c *cobra.Command) (st *shuntv1.GetStatusResponse, elsewhere bool, err error) {
	st, elsewhere, err = o.look(c)
	if err == nil && o.service != "" && st.Forwarding {
		err = only(st, o.service)
	}
	return st, elsewhere, err
}

// look asks the daemon, and reads the maps itself if there is none.
func (o *reading) look(c *cobra.Command) (st *shuntv1.GetStatusResponse, elsewhere bool, err error) {
	if err := errors.Join(cli.RequireOutput(o.output), o.Check()); err != nil {
		return nil, false, err
	}
	ctx, cancel := context.WithTimeout(c.Context(), cli.AnswerTimeout)
	defer cancel()
	err = o.Read(c, func(c *control.Client) (err error) {
		st, err = c.Status(ctx)
		return err
	})
	if err == nil {
		return st, false, nil
	}
	elsewhere = errors.Is(err, control.ErrOtherInstance) || errors.Is(err, control.ErrNoSocket) && node.Holder(o.Instance) != 0
	if errors.Is(err, control.ErrDenied) {
		return nil, false, err
	}
	if os.Geteuid() != 0 {
		return nil, false, fmt.Errorf("%w. Root can read the maps without a daemon: `%s`", err, cli.AsRoot())
	}
	silent := err.Error()
	dp, err := datapath.OpenReadOnly(store.Options{Instance: o.Instance})
	if errors.Is(err, store.ErrNotLoaded) {
		return &shuntv1.GetStatusResponse{Instance: o.Instance, DaemonError: silent}, elsewhere, nil
	}
	if err != nil {
		return nil, false, err
	}
	defer dp.Close() //nolint:errcheck // nothing was written
	st = &shuntv1.GetStatusResponse{Instance: o.Instance}
	beat, err := status.Read(dp, st)
	if err != nil {
		return nil, false, err
	}
	st.DaemonError = silent
	elsewhere = elsewhere && st.HeartbeatAgeSeconds < status.HeartbeatFresh
	if !elsewhere {
		st.UnattendedSince = timestamppb.New(beat.Round(time.Millisecond))
	}
	return st, elsewhere, nil
}
