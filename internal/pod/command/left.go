package command

import (
	"log/slog"
	"maps"
	"slices"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/pod/daemon"
)

// left lists the pairs of sockets that daemons have left, for `shunt uninstall`.
func left() (all []cli.Trace, err error) {
	pairs, err := daemon.LeftPairs()
	for _, instance := range slices.Sorted(maps.Keys(pairs)) {
		all = append(all, cli.Trace{Kind: "pin", What: pairs[instance] + ": pairs of sockets, whose connections go on by TCP", Remove: func() error {
			return daemon.Product().Remove(instance, slog.New(slog.DiscardHandler))
		}})
	}
	return all, err
}
