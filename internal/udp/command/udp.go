package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
)

// shownLeases is the UDP path as commands show it.
var shownLeases = cli.ShownProduct{Name: "udp", It: "it", Show: "show the UDP path's leases", Page: "docs/guide/udp.md"}

func newUDP(s cli.Streams) *cobra.Command {
	c := &cobra.Command{
		Use:   "udp",
		Short: "Show the UDP path: datagrams that skip the kernel's stack, and the programs that get them",
		Long: `Show the leases of the configuration's key udp: the process that has each lease, and where its datagrams went.

MATCHED are all datagrams of a lease. Of these, the program read those counted as DELIVERED; PASSED datagrams
went to the kernel's socket because their queue had no AF_XDP socket; DROPPED datagrams found no room, or no
AF_XDP socket while the entry has on_no_socket: drop.`,
		Example: `  shunt udp list            # a row for each lease
  shunt udp show feed       # one lease: the process that has it, and each queue
  shunt udp top             # rates, every second, until Ctrl-C
  shunt udp doctor eth0     # faults of an interface, and the commands that fix them`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newUDPList(s), newUDPShow(s), newUDPTop(s), newUDPDoctor(s))
	return c
}

func newUDPList(s cli.Streams) *cobra.Command {
	o := cli.ProductReading{Of: shownLeases}
	c := &cobra.Command{
		Use:   "list",
		Short: "List the leases, a row for each",
		Example: `  shunt udp list
  shunt udp list -o json`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			st, err := o.Status(c.Context(), c)
			if err != nil {
				return err
			}
			all := st.GetUdp()
			if o.Output == "json" {
				return cli.WriteMessages(s.Out, all)
			}
			printLeases(s.Out, all)
			return nil
		},
	}
	o.Flags(c)
	return c
}

// holderText describes the holder of a lease in a few words.
func holderText(l *shuntv1.UDPLease) string {
	switch {
	case l.Failed != "":
		return "failed"
	case l.Awaited:
		return "awaited"
	case l.Holder == nil:
		return "nobody"
	}
	return fmt.Sprintf("process %d, user %d", l.Holder.Pid, l.Holder.Uid)
}

// modeText describes how its holder gets datagrams.
func modeText(l *shuntv1.UDPLease) string {
	if l.Holder == nil {
		return "-"
	}
	return l.Holder.Mode
}

func dropped(c *shuntv1.UDPCounts) uint64 {
	return c.GetFillEmpty() + c.GetRingFull() + c.GetDroppedNoSocket()
}

func printLeases(w io.Writer, all []*shuntv1.UDPLease) {
	if len(all) == 0 {
		fmt.Fprintln(w, "There are no leases: udp is an empty list.")
		return
	}
	t := cli.NewTable(w)
	fmt.Fprintln(t, "LEASE\tINTERFACE\tADDRESSES\tHOLDER\tMODE\tMATCHED\tDELIVERED\tPASSED\tDROPPED")
	for _, l := range all {
		addresses, left := cli.First(l.Addresses, 2, false)
		text := strings.Join(addresses, " ")
		if left > 0 {
			text += fmt.Sprintf(" and %d more", left)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\n", l.Name, l.Interface, text, holderText(l), modeText(l),
			l.Total.GetMatched(), l.Total.GetDelivered(), l.Total.GetPassedNoSocket(), dropped(l.Total))
	}
	t.Flush()
}

func newUDPShow(s cli.Streams) *cobra.Command {
	o := cli.ProductReading{Of: shownLeases}
	c := &cobra.Command{
		Use:   "show NAME",
		Short: "Show one lease: the process that has it, its queues with their rings, and how earlier leases ended",
		Long: `Show one lease. NO SOCKET are datagrams that were dropped because no AF_XDP socket took them
(on_no_socket: drop); FILL EMPTY and RING FULL were dropped as well. CPU is the CPU that the entry names for
the queue (cpu), with "(pinned)" if one of the program's threads is pinned to it. OLDEST is the time that the
oldest datagram in the ring has waited, if the entry has timestamps. With busy_poll, the command compares the
configured time with the interface's present values.

The second table has the program's own counters, from its last renewal of the lease; shunt cannot check them.
STALE are datagrams that the program dropped as too old (they are among the DELIVERED), TX SHORT frames for
which it had no room to send, KICKS its system calls to send, WAKEUPS the times that a datagram woke it. A "-"
means that the program has not reported.`,
		Example: `  shunt udp show feed
  shunt udp show feed -o json | jq .holder.queues`,
		Args: cli.OneOf("lease", "shunt udp list"),
		RunE: func(c *cobra.Command, args []string) error {
			st, err := o.Status(c.Context(), c)
			if err != nil {
				return err
			}
			all := st.GetUdp()
			i := slices.IndexFunc(all, func(l *shuntv1.UDPLease) bool { return l.Name == args[0] })
			if i < 0 {
				var names []string
				for _, l := range all {
					names = append(names, l.Name)
				}
				return fmt.Errorf("show the lease %q: no lease has this name; there are %s", args[0], cmp.Or(strings.Join(names, ", "), "none at all"))
			}
			if o.Output == "json" {
				return cli.WriteMessage(s.Out, all[i])
			}
			printLease(s.Out, all[i])
			return nil
		},
	}
	o.Flags(c)
	return c
}

func printLease(w io.Writer, l *shuntv1.UDPLease) {
	fmt.Fprintf(w, "Lease %s: datagrams to %s on interface %s.\n", l.Name, strings.Join(l.Addresses, ", "), l.Interface)
	h := l.Holder
	switch {
	case l.Failed != "":
		fmt.Fprintf(w, "shunt cannot lend it, and tries again: %s.\n", l.Failed)
	case l.Awaited:
		fmt.Fprintln(w, "A program has had it since an earlier daemon, and gets the datagrams, but has not connected to this daemon yet.")
	case h == nil:
		fate := "the kernel's socket gets the datagrams"
		if l.OnNoSocket == "drop" {
			fate = "the datagrams are dropped"
		}
		fmt.Fprintf(w, "No program has it: %s. The program is on the interface in %s mode.\n", fate, l.Program)
	default:
		fmt.Fprintf(w, "Process %d has it since %s: user %d, group %d, cgroup %q.\n", h.Pid, h.Since.AsTime().Local().Format(time.DateTime), h.Uid, h.Gid, h.Cgroup)
		reason := ""
		if h.Reason != "" {
			reason = " (" + h.Reason + ")"
		}
		fmt.Fprintf(w, "Its mode is %s%s. Each receive ring has %d entries.\n", h.Mode, reason, h.RingSize)
	}
	if l.OnNoSocket == "drop" && h != nil {
		fmt.Fprintln(w, "Datagrams that no socket takes are dropped.")
	}
	if l.Wait != "" {
		fmt.Fprintf(w, "Advice how to wait for datagrams: %s.\n", l.Wait)
	}
	if l.BusyPoll != nil {
		fmt.Fprintln(w, busyPollText(l))
	}
	ends := make([]string, 0, len(l.Ended))
	for _, why := range slices.Sorted(maps.Keys(l.Ended)) {
		ends = append(ends, fmt.Sprintf("%s %d", why, l.Ended[why]))
	}
	if len(ends) > 0 {
		fmt.Fprintf(w, "Leases so far: %d. Ended: %s; the last one: %s.\n", l.Given, strings.Join(ends, ", "), l.LastEnd)
	} else {
		fmt.Fprintf(w, "Leases so far: %d.\n", l.Given)
	}
	if l.Resumed > 0 {
		fmt.Fprintf(w, "Of these, %d began with an earlier daemon, and went on.\n", l.Resumed)
	}
	fmt.Fprintln(w)
	t := cli.NewTable(w)
	fmt.Fprintln(t, "QUEUE\tCPU\tMATCHED\tDELIVERED\tPASSED\tNO SOCKET\tFILL EMPTY\tRING FULL\tWAITING\tOLDEST\tFREE\tINVALID\tTX INVALID")
	row := func(name, cpu string, c *shuntv1.UDPCounts, oldest, free string) {
		fmt.Fprintf(t, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%s\t%s\t%d\t%d\n", name, cpu, c.GetMatched(), c.GetDelivered(), c.GetPassedNoSocket(), c.GetDroppedNoSocket(), c.GetFillEmpty(),
			c.GetRingFull(), c.GetWaiting(), oldest, free, c.GetInvalid(), c.GetTxInvalid())
	}
	if h != nil {
		for _, q := range h.Queues {
			row(strconv.FormatUint(uint64(q.Queue), 10), cpuText(q), q.Counts, oldestText(q), strconv.FormatUint(uint64(q.Free), 10))
		}
		if h.Elsewhere.GetMatched() > 0 {
			row("others", "-", h.Elsewhere, "-", "-")
		}
	}
	row("all leases", "-", l.Total, "-", "-")
	t.Flush()
	printClaims(w, l)
}

// printClaims prints the counters of programs themselves, separate from those of shunt and the kernel.
func printClaims(w io.Writer, l *shuntv1.UDPLease) {
	if l.Holder == nil && l.Claimed == nil {
		return
	}
	fmt.Fprintln(w, "\nCounted by the program itself, when it last renewed the lease:")
	t := cli.NewTable(w)
	fmt.Fprintln(t, "QUEUE\tSTALE\tTX SHORT\tKICKS\tWAKEUPS")
	row := func(name string, c *shuntv1.UDPClaim) {
		if c == nil {
			fmt.Fprintf(t, "%s\t-\t-\t-\t-\n", name)
			return
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\n", name, c.Stale, c.TxShort, c.Kicks, c.Wakeups)
	}
	for _, q := range l.GetHolder().GetQueues() {
		row(strconv.FormatUint(uint64(q.Queue), 10), q.Claim)
	}
	row("all leases", l.Claimed)
	t.Flush()
}

// busyPollText compares the configured busy polling with the values in force.
func busyPollText(l *shuntv1.UDPLease) string {
	want, is := l.BusyPoll.AsDuration(), l.Interrupts
	flush := is.GetFlushTimeout().AsDuration()
	switch {
	case is.GetFailed() != "":
		return fmt.Sprintf("Busy polling: %s as configured; the value in force is unknown: %s.", want, is.Failed)
	case is.GetEmptyPolls() == 0:
		return fmt.Sprintf("Busy polling: %s as configured; in force: none, interrupts of %s are on (`shunt status` says why).", want, l.Interface)
	}
	return fmt.Sprintf("Busy polling: %s as configured; in force: %s, until %d polls of %s have found nothing.", want, flush, is.EmptyPolls, l.Interface)
}

// cpuText compares the configured CPU with where the program's threads may run.
func cpuText(q *shuntv1.UDPQueue) string {
	switch {
	case q.Cpu == nil:
		return "any"
	case q.Pinned == nil:
		return fmt.Sprintf("%d (not known)", q.GetCpu())
	case q.GetPinned() == 0:
		return fmt.Sprintf("%d (not pinned)", q.GetCpu())
	}
	return fmt.Sprintf("%d (pinned)", q.GetCpu())
}

// oldestText returns the waiting time of the oldest datagram in a ring.
func oldestText(q *shuntv1.UDPQueue) string {
	if q.Oldest == nil {
		return "-"
	}
	return q.Oldest.AsDuration().Round(time.Microsecond).String()
}

func newUDPTop(s cli.Streams) *cobra.Command {
	o := cli.ProductReading{Of: shownLeases}
	var count int
	var interval time.Duration
	c := &cobra.Command{
		Use:   "top",
		Short: "Show datagrams per second of each lease, at each interval, until Ctrl-C",
		Long: `Show where each lease's datagrams went in the last interval, per second, and how full its rings are
now: WAITING of ENTRIES, over all queues.`,
		Example: `  shunt udp top
  shunt udp top --interval 5s --count 1
  shunt udp top -o json     # a line of JSON for each interval`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if interval < 100*time.Millisecond || count < 0 {
				return cli.UsageError{Err: errors.New("--interval must be 100ms or more, and --count 0 or more")}
			}
			ctx, stop := cli.UntilStopped(c.Context())
			defer stop()
			return topLeases(ctx, &o, c, s.Out, interval, count)
		},
	}
	o.Flags(c)
	c.Flags().DurationVar(&interval, "interval", time.Second, "time between two readings")
	c.Flags().IntVar(&count, "count", 0, "end after this many intervals; 0: at Ctrl-C")
	return c
}

// leaseRate is a lease in an interval. Its numbers are per second, except for present values.
type leaseRate struct {
	Lease     string  `json:"lease"`
	Holder    string  `json:"holder"`
	Matched   float64 `json:"matched"`
	Delivered float64 `json:"delivered"`
	Passed    float64 `json:"passed"`
	NoSocket  float64 `json:"dropped_no_socket"`
	FillEmpty float64 `json:"fill_empty"`
	RingFull  float64 `json:"ring_full"`
	Waiting   uint64  `json:"waiting"` // now
	Entries   uint64  `json:"entries"` // of its rings
}

// topLeases prints rates until ctx ends.
func topLeases(ctx context.Context, o *cli.ProductReading, c *cobra.Command, w io.Writer, interval time.Duration, count int) error {
	before, err := o.Status(ctx, c)
	if err != nil {
		return err
	}
	then := time.Now()
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for n := 0; count == 0 || n < count; n++ {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		now, err := o.Status(ctx, c)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		at := time.Now()
		rates := ratesOf(before.Udp, now.Udp, at.Sub(then).Seconds())
		if o.Output == "json" {
			err = cli.WriteLine(w, rates)
		} else {
			printRates(w, at, rates)
		}
		if err != nil {
			return err
		}
		before, then = now, at
	}
	return nil
}

// ratesOf returns the rates of the present leases.
func ratesOf(before, now []*shuntv1.UDPLease, seconds float64) (all []leaseRate) {
	for _, l := range now {
		was := &shuntv1.UDPCounts{}
		if i := slices.IndexFunc(before, func(b *shuntv1.UDPLease) bool { return b.Name == l.Name }); i >= 0 {
			was = before[i].Total
		}
		rate := func(is, was uint64) float64 {
			if is < was { // it has begun anew
				was = 0
			}
			return float64(is-was) / seconds
		}
		r := leaseRate{Lease: l.Name, Holder: holderText(l), Matched: rate(l.Total.Matched, was.Matched), Delivered: rate(l.Total.Delivered, was.Delivered),
			Passed: rate(l.Total.PassedNoSocket, was.PassedNoSocket), NoSocket: rate(l.Total.DroppedNoSocket, was.DroppedNoSocket), FillEmpty: rate(l.Total.FillEmpty, was.FillEmpty), RingFull: rate(l.Total.RingFull, was.RingFull)}
		for _, q := range l.GetHolder().GetQueues() {
			r.Waiting += q.Counts.GetWaiting()
			r.Entries += uint64(l.Holder.RingSize)
		}
		all = append(all, r)
	}
	return all
}

func printRates(w io.Writer, at time.Time, all []leaseRate) {
	t := cli.NewTable(w)
	fmt.Fprintf(t, "%s\tHOLDER\tMATCHED/s\tDELIVERED/s\tPASSED/s\tNO SOCKET/s\tFILL EMPTY/s\tRING FULL/s\tWAITING\tENTRIES\n", at.Local().Format(time.TimeOnly))
	for _, r := range all {
		fmt.Fprintf(t, "%s\t%s\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%d\t%d\n", r.Lease, r.Holder, r.Matched, r.Delivered, r.Passed, r.NoSocket, r.FillEmpty, r.RingFull, r.Waiting, r.Entries)
	}
	t.Flush()
	fmt.Fprintln(w)
}
