package command

import (
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/udp/daemon"
)

// left lists the remains of the UDP path for `shunt uninstall`: leases, and busy polling.
func left() (all []cli.Trace, err error) {
	add := func(instance, kind, what string) {
		all = append(all, cli.Trace{Kind: kind, What: what, Remove: func() error {
			return daemon.Product().Remove(instance, slog.New(slog.DiscardHandler))
		}})
	}
	leases, errLeases := daemon.LeftLeases()
	for _, instance := range slices.Sorted(maps.Keys(leases)) {
		add(instance, "pin", leases[instance]+": UDP leases, whose datagrams then go to the kernel's sockets")
	}
	polled, errPolled := daemon.LeftPolled()
	for _, instance := range slices.Sorted(maps.Keys(polled)) {
		add(instance, "setting", "interrupts as before busy polling, on "+strings.Join(polled[instance], ", "))
	}
	return all, errors.Join(errLeases, errPolled)
}
