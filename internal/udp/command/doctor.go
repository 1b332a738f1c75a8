package command

import (
	"errors"
	"fmt"
	"io"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/udp/doctor"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/spf13/cobra"
)

func newUDPDoctor(s cli.Streams) *cobra.Command {
	o := cli.ProductReading{Of: shownLeases}
	c := &cobra.Command{
		Use:   "doctor INTERFACE",
		Short: "Find faults that keep datagrams from programs or slow them down, and the commands that fix them",
		Long: `Look at an interface, its driver and the CPUs. The command changes nothing, and needs no daemon. If a daemon
lends leases of the interface with cpu, the command compares their CPUs with those of the interrupts and the
NUMA node.
A fault prevents a lease, or keeps datagrams from it; advice concerns speed. It exits with 0
if there is no fault, and with 1 otherwise.`,
		Example: `  shunt udp doctor eth0
  shunt udp doctor eth0 -o json`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if err := errors.Join(cli.RequireOutput(o.Output), o.Check()); err != nil {
				return err
			}
			facts, err := doctor.Look("/", args[0])
			if err != nil {
				return err
			}
			if st, err := o.Status(c.Context(), c); err != nil {
				facts.Unknown = append(facts.Unknown, fmt.Sprintf("the CPUs of programs: %v", err))
			} else {
				addWorkers(&facts, st.Udp)
			}
			return tellUDPFindings(s.Out, facts, doctor.Examine(facts), o.Output)
		},
	}
	o.Flags(c)
	return c
}

// addWorkers adds the programs that work off an interface's queues.
func addWorkers(facts *doctor.Facts, leases []*shuntv1.UDPLease) {
	for _, l := range leases {
		if l.Interface != facts.Interface {
			continue
		}
		if l.Holder == nil {
			facts.Unknown = append(facts.Unknown, fmt.Sprintf("the CPUs of the lease %s: no program has it", l.Name))
			continue
		}
		named := false
		for _, q := range l.Holder.Queues {
			if q.Cpu == nil {
				continue
			}
			named = true
			facts.Workers = append(facts.Workers, doctor.Worker{Lease: l.Name, Queue: int(q.Queue), CPU: int(q.GetCpu()), Pinned: q.Pinned == nil || q.GetPinned() > 0, BusyPoll: l.BusyPoll != nil})
		}
		if !named {
			facts.Unknown = append(facts.Unknown, fmt.Sprintf("the CPUs of the lease %s: its entry has no cpu", l.Name))
		}
	}
}

func tellUDPFindings(w io.Writer, facts doctor.Facts, findings []doctor.Finding, output string) error {
	faults := 0
	for _, f := range findings {
		if f.Fault {
			faults++
		}
	}
	var err error
	if output == "json" {
		err = cli.WriteJSON(w, map[string]any{"ok": faults == 0, "interface": facts.Interface, "findings": findings, "unknown": facts.Unknown})
	} else {
		err = printUDPFindings(w, facts, findings, faults)
	}
	if err == nil && faults > 0 {
		err = cli.ErrSilent
	}
	return err
}

func printUDPFindings(w io.Writer, facts doctor.Facts, findings []doctor.Finding, faults int) (err error) {
	line := func(format string, args ...any) {
		if err == nil {
			_, err = fmt.Fprintf(w, format+"\n", args...)
		}
	}
	for _, f := range findings {
		kind := "advice"
		if f.Fault {
			kind = "fault"
		}
		line("%s: %s\n  why   %s\n  fix   %s\n", kind, f.Text, f.Why, f.Remedy)
	}
	for _, what := range facts.Unknown {
		line("Not known: %s.", what)
	}
	line("%s and %s on %s.", value.Counted(faults, "fault"), value.Counted(len(findings)-faults, "other finding"), facts.Interface)
	return err
}
