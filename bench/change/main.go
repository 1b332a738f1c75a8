// Change measures the cost for the daemon of starting with many services, and of changing one of them:
//
//	go run -exec sudo ./bench/change --shunt ./shunt --services 1000 --backends 50
//
// It lays a cable between two network namespaces, writes a configuration of so many services, whose
// backends are all behind the router at the other end, and runs the given program in one of them. The
// time ends when the command ends, or for the start when status answers; CPU time is the time that
// daemon and command use meanwhile, in all threads together. With --out it also writes a page.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/internal/lb/maglev"
)

// options is the command line.
type options struct {
	shunt     string
	services  int
	backends  int // of each service
	tableSize uint32
	rounds    int
	checked   bool
	out       string
}

func parseOptions(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("change", flag.ContinueOnError)
	flags.StringVar(&o.shunt, "shunt", "./shunt", "the program to measure")
	flags.IntVar(&o.services, "services", 1000, "number of services")
	flags.IntVar(&o.backends, "backends", 50, "backends of each service; none is in two")
	size := flags.Uint("table-size", 4093, "slots of each service's table; 0: as many as without table_size")
	flags.IntVar(&o.rounds, "rounds", 5, "number of times that each change is made; the page has the median")
	flags.BoolVar(&o.checked, "checked", false, "give the services health checks, one an hour, so that the metrics include them")
	flags.StringVar(&o.out, "out", "", "directory for a page with the figures")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.tableSize = uint32(*size)
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("%q: unexpected argument; there are only flags", flags.Arg(0))
	case o.services < 1 || o.services > 65_000:
		return o, fmt.Errorf("--services %d: must be 1 to 65000, because each has an address of its own", o.services)
	case o.backends < 1 || o.services*o.backends > 1_000_000:
		return o, fmt.Errorf("--backends %d: all services together can have at most a million", o.backends)
	case o.rounds < 1:
		return o, fmt.Errorf("--rounds %d: must be at least 1", o.rounds)
	}
	return o, nil
}

// slots is the number of slots of each service.
func (o options) slots() uint32 { return cmp.Or(o.tableSize, maglev.SizeFor(o.backends)) }

func main() {
	o, err := parseOptions(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	if err == nil {
		err = run(ctx, o)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "change:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	if os.Geteuid() != 0 {
		return errors.New("running shunt and making network namespaces needs root; run this again with go run -exec sudo")
	}
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	figures, err := measure(ctx, o)
	if err != nil {
		return err
	}
	var page strings.Builder
	report(&page, o, m, figures)
	fmt.Print(page.String())
	if o.out == "" {
		return nil
	}
	return os.WriteFile(filepath.Join(o.out, m.ReportName(o.out, "change-")+".md"), []byte(page.String()), 0o644)
}

// report writes the figures for people.
func report(w io.Writer, o options, m machine.Machine, figures []figure) {
	fmt.Fprintf(w, "# What a change costs the daemon, %s\n\n%s. %s\n\n    %s\n\n", m.Date, m, m.Faults(), machine.Command("bench/change"))
	fmt.Fprintf(w, "%d services of %d backends each, %d slots a service, all backends behind one router. "+
		"CPU time is that of daemon and command together; changes are medians of %d.\n\n", o.services, o.backends, o.slots(), o.rounds)
	fmt.Fprintln(w, "| what | time | CPU time | memory of the daemon, then | peak |\n|---|---:|---:|---:|---:|")
	for _, f := range figures {
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s |\n", f.what, round(f.time), round(f.cpu), megabytes(f.memory), megabytes(f.peak))
	}
	fmt.Fprintln(w, "\nMemory is VmRSS and VmHWM of proc(5), so they include the parts of maps and of the program that the daemon has mapped. The peak is since the start of the daemon.")
}

func round(d time.Duration) string { return fmt.Sprintf("%.3f s", d.Seconds()) }

func megabytes(bytes uint64) string {
	if bytes == 0 {
		return ""
	}
	return fmt.Sprintf("%d MB", bytes/1_000_000)
}

// vip is the address of the i-th service (RFC 2544's network for benchmarks).
func vip(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18 + byte(i>>15)&1, byte(i >> 7), byte(i << 1)})
}

// backend is the address of the n-th backend of all.
func backend(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
}

// configuration is the file, in which the first backend of one service has another weight than all
// others.
func configuration(o options, changed, weight int) string {
	var text strings.Builder
	fmt.Fprintf(&text, "interfaces:\n  - name: %s\nlimits:\n  services: %d\n  backends: %d\n  slots: %d\n  flows: 1024\n  remembered: 1024\nmetrics: {listen: %q, max_series: 10000000}\nservices:\n",
		iface, o.services+1, 2*o.services*o.backends, min(2*uint64(o.services)*uint64(o.slots()), slotsMax), metricsAt)
	health := ""
	if o.checked {
		health = "    health: {tcp: {}, interval: 1h, timeout: 10ms}\n"
	}
	for i := range o.services {
		fmt.Fprintf(&text, "  - name: service-%05d\n    address: %s\n    port: 80\n%s", i, vip(i), health)
		if o.tableSize > 0 {
			fmt.Fprintf(&text, "    table_size: %d\n", o.tableSize)
		}
		text.WriteString("    backends:\n")
		for j := range o.backends {
			w := 10
			if i == changed && j == 0 {
				w = weight
			}
			fmt.Fprintf(&text, "      - address: %s\n        port: 8080\n        weight: %d\n", backend(1<<16+i*o.backends+j), w)
		}
	}
	return text.String()
}
