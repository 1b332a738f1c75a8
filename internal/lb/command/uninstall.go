package command

import (
	"bufio"
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/moving"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/settings"
	"github.com/shunt-lb/shunt/internal/start"
)

func newUninstall(s cli.Streams, products func() []node.Product, others []cli.Product) *cobra.Command {
	var path, output string
	var yes bool
	c := &cobra.Command{
		Use:   "uninstall",
		Short: "List and remove every trace of shunt, except installed files; asks first (needs root)",
		Long: `Remove what shunt has left on this machine: the data planes of all instances, pairs of sockets, neighbour
entries, multicast groups, settings that shunt has changed, the changes that ` + "`shunt decap`" + ` has made, the
protection and the decoys of ` + "`shunt guard`" + `, the nftables table of ` + "`shunt-kube run --moving`" + `, and shunt's files in
/run/shunt and /var/lib/shunt. The command lists all of this and asks first; with --yes it does not ask. It refuses to run while a daemon runs.

Installed files stay: the binary and /etc/shunt. Your package manager removes them.`,
		Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := errors.Join(cli.RequireOutput(output), cli.RequireRoot("uninstall", "removes programs from the kernel and restores settings")); err != nil {
				return err
			}
			socket := start.DefaultSocket
			if read, err := node.Format(products()).Read(path); err == nil && !config.HasErrors(read.Faults.Sorted()) {
				own, _ := settings.Of(read)
				socket = own.API.Socket
			}
			inventory, err := daemon.TakeInventory(socket)
			if err != nil {
				return fmt.Errorf("nothing was removed: %w", err)
			}
			defer inventory.Close()
			if err := errors.Join(addOthers(inventory, others), addMoving(inventory)); err != nil {
				return fmt.Errorf("nothing was removed: %w", err)
			}
			if output == "json" {
				return uninstallJSON(s, inventory, yes)
			}
			if err := printInventory(s, inventory); err != nil || len(inventory.Traces) == 0 {
				return err
			}
			if !yes && !agreed(s) {
				fmt.Fprintln(s.Err, "shunt: nothing was removed. Answer y, or give --yes if nobody can answer.")
				return cli.ErrSilent
			}
			log, err := cli.NewLog(s.Err, "text", false)
			if err == nil {
				err = inventory.Remove(log)
			}
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(s.Out, "All of it is gone.")
			return err
		},
	}
	c.Flags().BoolVar(&yes, "yes", false, "remove without asking")
	c.Flags().StringVar(&path, "config", start.DefaultConfig, "configuration that may name another control socket; it is not removed")
	cli.OutputFlag(c, &output)
	return c
}

// addOthers adds the objects that the other products have left.
func addOthers(inventory *daemon.Inventory, others []cli.Product) error {
	var errs []error
	for _, p := range others {
		if p.Left == nil {
			continue
		}
		left, err := p.Left()
		errs = append(errs, err)
		for _, t := range left {
			inventory.Also(daemon.Trace{Kind: t.Kind, What: t.What}, t.Remove)
		}
	}
	return errors.Join(errs...)
}

// addMoving lists the table of a `shunt-kube run --moving` that keeps no data plane any more, or was killed.
func addMoving(inventory *daemon.Inventory) error {
	left, err := moving.Left()
	if left {
		inventory.Also(daemon.Trace{Kind: "table", What: "nftables table inet " + moving.Table + ": keeps connections of kube-proxy's alive"}, func() error {
			_, err := moving.Remove()
			return err
		})
	}
	return err
}

// uninstallJSON lists the traces, and removes them with --yes; there is no user to ask.
func uninstallJSON(s cli.Streams, inventory *daemon.Inventory, yes bool) error {
	if yes {
		log, err := cli.NewLog(s.Err, "text", false)
		if err == nil {
			err = inventory.Remove(log)
		}
		if err != nil {
			return err
		}
	}
	return cli.WriteJSON(s.Out, struct {
		Removed bool `json:"removed"`
		*daemon.Inventory
	}{yes, inventory})
}

func printInventory(s cli.Streams, inventory *daemon.Inventory) error {
	if len(inventory.Traces) == 0 {
		fmt.Fprintln(s.Out, "There is no trace of shunt here.")
	} else {
		fmt.Fprintln(s.Out, "shunt removes or restores the following, and traffic through shunt ends:")
	}
	t := tabwriter.NewWriter(s.Out, 0, 8, 2, ' ', 0)
	for _, trace := range inventory.Traces {
		fmt.Fprintf(t, "  %s\t%s\n", trace.Kind, trace.What)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(inventory.Elsewhere) > 0 {
		fmt.Fprintln(s.Out, "The following stays; run `shunt uninstall` in that network namespace too. If the namespace is gone, delete its files in /run/shunt and /sys/fs/bpf/shunt:")
	}
	for _, trace := range inventory.Elsewhere {
		fmt.Fprintf(s.Out, "  %s\n", trace.What)
	}
	return nil
}

// agreed asks, and accepts y or yes as an answer.
func agreed(s cli.Streams) bool {
	fmt.Fprint(s.Out, "Remove all of this? [y/N] ")
	line, err := bufio.NewReader(s.In).ReadString('\n')
	if err != nil {
		fmt.Fprintln(s.Out)
	}
	answer := strings.ToLower(strings.TrimSpace(line))
	return answer == "y" || answer == "yes"
}
