package command

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/start"
)

const chainHelp = `The kernel runs one XDP program on an interface. So that another program can run beside
shunt's, shunt calls that program, or that program calls shunt:

  packet ─► before ─► shunt ─┬─► sent on, dropped
                             └─► passed ─► (guest) ─► after ─► the kernel's stack

before  sees every packet. It hands a packet on to shunt by a tail call to element 1 of the map
        that ` + "`shunt chain list`" + ` names. If it returns a verdict, shunt does not see
        the packet.
after   sees the packets that shunt passes to the stack. Its verdict is final.
guest   is the program of another product of the same daemon that uses the interface, too:
        the UDP path. It comes and goes with the configuration file.

Both must be XDP programs for frames in several buffers (SEC("xdp.frags")). They must be loaded
and pinned:

  bpftool prog load filter.o /sys/fs/bpf/filter map name sh_chain pinned MAP
  shunt chain set --interface eth0 --position before --program /sys/fs/bpf/filter

These commands need no daemon. A program that is set stays when the daemon ends and when
another daemon takes over. It is removed by ` + "`shunt chain clear`" + `, by ` + "`shunt detach`" + `, and when
` + "`shunt run`" + ` detaches.
docs/guide/chaining.md has an example to start from.`

func newChain(s cli.Streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "chain",
		Short: "Run other XDP programs before and after shunt's on an interface",
		Long:  chainHelp,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) > 0 {
				return cli.UsageError{Err: fmt.Errorf("there is no command `chain %s`; there are list, set and clear", args[0])}
			}
			return c.Help()
		},
	}
	c.AddCommand(newChainList(s), newChainSet(s), newChainClear(s))
	return c
}

func newChainList(s cli.Streams) *cobra.Command {
	var instance, iface, output string
	c := &cobra.Command{
		Use:   "list",
		Short: "List the programs on each interface, in the order in which a packet meets them",
		Args:  cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := errors.Join(cli.RequireOutput(output), cli.RequireInstance(instance), cli.RequireRoot("chain list", "reads maps of the kernel")); err != nil {
				return err
			}
			all, err := listChains(store.Options{Instance: instance}, iface)
			if err != nil {
				return err
			}
			if output == "json" {
				return cli.WriteJSON(s.Out, cli.NonNil(all))
			}
			return printChains(s.Out, all)
		},
	}
	start.InstanceFlag(c, &instance)
	cli.OutputFlag(c, &output)
	c.Flags().StringVar(&iface, "interface", "", "list only this interface")
	return c
}

// listChains lists the chain of one interface, or of every one if iface is empty.
func listChains(opts store.Options, iface string) ([]attach.Chain, error) {
	all, err := attach.Chains(opts)
	if err != nil || iface == "" {
		return all, err
	}
	all = slices.DeleteFunc(all, func(c attach.Chain) bool { return c.Interface != iface })
	if len(all) == 0 {
		return nil, fmt.Errorf("list the chain of interface %s: instance %q is not attached to it; leave out --interface to list all interfaces", iface, opts.Instance)
	}
	return all, nil
}

func printChains(w io.Writer, all []attach.Chain) error {
	t := cli.NewTable(w)
	fmt.Fprintln(t, "INTERFACE\tPOSITION\tPROGRAM\tID\tTAG")
	for _, c := range all {
		first := c.Interface
		for _, entry := range c.Entries() {
			fmt.Fprintf(t, "%s\t%s\t%s\n", first, positionCell(string(entry.Position)), strings.Join(chainedCells(entry.Program), "\t"))
			first = ""
		}
	}
	t.Flush()
	for _, c := range all {
		fmt.Fprintf(w, "\n%s: a program before calls element 1 of %s\n", c.Interface, c.Map)
		want := c.Shunt
		if c.Before != nil {
			want = c.Before
		}
		if want != nil && want.ID != c.Attached {
			fmt.Fprintf(w, "%s: the interface runs program %d instead of the first in this list: a change was interrupted; repeat the change, or restart `shunt run`\n", c.Interface, c.Attached)
		}
	}
	return nil
}

// positionCell distinguishes shunt's own positions from those of others.
func positionCell(position string) string {
	switch attach.Position(position) {
	case attach.PositionShunt, attach.PositionGuest:
		return "(" + position + ")"
	}
	return position
}

func chainedCells(p *attach.Chained) []string {
	if p == nil {
		return []string{"-", "-", "-"}
	}
	return []string{p.Name, strconv.Itoa(int(p.ID)), p.Tag}
}

// chainOptions are the flags of `chain set` and `chain clear`.
type chainOptions struct {
	instance, iface, position, program string
}

func (o *chainOptions) flags(c *cobra.Command) {
	start.InstanceFlag(c, &o.instance)
	c.Flags().StringVar(&o.iface, "interface", "", "the interface that shunt is attached to")
	c.Flags().StringVar(&o.position, "position", "", "position of the program: before or after shunt's")
}

func (o *chainOptions) check(command string) error {
	switch {
	case o.iface == "":
		return cli.UsageError{Err: errors.New("--interface is missing: name the interface; `shunt chain list` shows the interfaces")}
	case o.position == "":
		return cli.UsageError{Err: errors.New("--position is missing: write before or after")}
	case !slices.Contains(attach.Positions, attach.Position(o.position)):
		return cli.UsageError{Err: fmt.Errorf("--position is before or after, not %q", o.position)}
	}
	return errors.Join(cli.RequireInstance(o.instance), cli.RequireRoot(command, "changes which programs the kernel runs"))
}

func newChainSet(s cli.Streams) *cobra.Command {
	var o chainOptions
	c := &cobra.Command{
		Use:   "set",
		Short: "Run a pinned program before or after shunt's; it replaces the program in that position",
		Long:  "Run a pinned program before or after shunt's. It replaces the program in that position. No\npacket is lost, and you may remove the pin afterwards.\n\n" + chainHelp,
		Args:  cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			switch {
			case o.program == "":
				return cli.UsageError{Err: errors.New("--program is missing: name the program's pin, such as /sys/fs/bpf/filter")}
			case !filepath.IsAbs(o.program):
				return cli.UsageError{Err: fmt.Errorf("--program %q: name the whole path, such as /sys/fs/bpf/filter", o.program)}
			}
			if err := o.check("chain set"); err != nil {
				return err
			}
			if err := attach.SetChain(store.Options{Instance: o.instance}, o.iface, attach.Position(o.position), o.program); err != nil {
				return err
			}
			_, err := fmt.Fprintf(s.Out, "%s: the program pinned at %s runs %s shunt from now on.\n", o.iface, o.program, o.position)
			return err
		},
	}
	o.flags(c)
	c.Flags().StringVar(&o.program, "program", "", "path in bpffs at which the program is pinned")
	return c
}

func newChainClear(s cli.Streams) *cobra.Command {
	var o chainOptions
	c := &cobra.Command{
		Use:   "clear",
		Short: "Remove the program that runs before or after shunt's; succeed if there is none",
		Args:  cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := o.check("chain clear"); err != nil {
				return err
			}
			was, err := attach.ClearChain(store.Options{Instance: o.instance}, o.iface, attach.Position(o.position))
			if err != nil {
				return err
			}
			if was == nil {
				_, err = fmt.Fprintf(s.Out, "%s: nothing ran %s shunt.\n", o.iface, o.position)
			} else {
				_, err = fmt.Fprintf(s.Out, "%s: %s no longer runs %s shunt.\n", o.iface, was, o.position)
			}
			return err
		},
	}
	o.flags(c)
	return c
}
