// Percall measures the cost of shunt's XDP program per packet of an established flow, in nanoseconds on one
// CPU, without the network around it:
//
//	go run -exec sudo ./bench/percall                                  NAT; starts shunt run in a namespace
//	go run -exec sudo ./bench/percall --link PIN --reverse-link PIN    NAT; takes a running instance's programs
//	go run -exec sudo ./bench/percall --direct                         direct return; starts shunt run
//	go run -exec sudo ./bench/percall --direct --katran DIR            with katran beside it, from a checkout
//
// The program and its maps are the ones that shunt run has loaded, never a bench build. Flows of NAT are made
// as real ones are: SYN, answer, ACK, each a run of the program. Those of direct return need nothing; their
// slots are settled, as they are unless the table has just changed, and for comparison also put into other
// states by writing sh_slots. Then the kernel runs the program in a loop (BPF_PROG_TEST_RUN with repeat)
// behind sh_front, which restores a prepared packet of the next flow before each run (see
// bench/bpf/front.bpf.c), and the same front is run with stubs. Candidates are interleaved, and the difference
// to a stub is the program's net cost. The kernel's work after the verdict (redirecting, transmitting) is in
// none of the figures.
//
// How to read them: nanoseconds are minima of all rounds, and give an idea of the size. To judge and to
// compare, take the ratio: net cost over front + push, computed within each round, as the median of all rounds
// with its quartiles. A machine that changes its speed changes both alike. If the quartiles lie far apart,
// take more --rounds; short ones (--repeat 100000) are better than long ones. To compare builds, give them by
// --shunt, run after run in turn.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/bits"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/bench/machine"
)

// options is the command line.
type options struct {
	flows       []uint32
	rounds      int
	repeat      int // packets per measurement; at least one pass over all flows
	cpu         int
	shunt       string
	shuntArgs   string
	link        string
	reverseLink string
	service     netip.AddrPort
	clients     netip.Prefix
	ordered     bool
	features    bool
	json        bool
	direct      bool
	katran      string    // a checkout
	forwardings []string  // of direct return
	traffics    []traffic // of direct return
	slots       []string  // their states
}

// figures is the result for one number of flows. Costs are nanoseconds per packet,
// the front included unless the name says net.
type figures struct {
	Flows      uint32  `json:"flows"`
	Config     string  `json:"config"` // where the program came from
	FrontDrop  float64 `json:"front_drop_ns"`
	FrontPush  float64 `json:"front_push_ns"`
	FrontFind  float64 `json:"front_find_ns"`
	Forward    float64 `json:"forward_ns"`
	Reverse    float64 `json:"reverse_ns"`
	ForwardNet float64 `json:"forward_net_ns"` // above the stub that drops
	ReverseNet float64 `json:"reverse_net_ns"`
	// Net over front + push, of each round.
	FindRatio    ratio  `json:"find_net_ratio"`
	ForwardRatio ratio  `json:"forward_net_ratio"`
	ReverseRatio ratio  `json:"reverse_net_ratio"`
	Program      string `json:"program"` // sizes, to judge a change by
}

func main() {
	o := parseFlags()
	// Everything runs on one locked thread, pinned to one CPU.
	runtime.LockOSThread()
	var set unix.CPUSet
	set.Set(o.cpu)
	err := unix.SchedSetaffinity(0, &set)
	if err != nil {
		err = fmt.Errorf("pin to CPU %d: %w; choose another with --cpu", o.cpu, err)
	} else if o.direct {
		err = runDirect(o)
	} else {
		err = run(o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "percall:", err)
		os.Exit(1)
	}
}

// parseFlags reads the command line and exits on a wrong one.
func parseFlags() options {
	var o options
	flows := flag.String("flows", "1,65536,1048576", "numbers of flows, powers of two, comma separated")
	flag.IntVar(&o.rounds, "rounds", 15, "number of rounds; the report has medians of ratios, and minima of nanoseconds")
	flag.IntVar(&o.repeat, "repeat", 1<<20, "packets per measurement")
	flag.IntVar(&o.cpu, "cpu", runtime.NumCPU()-1, "CPU to run on")
	flag.StringVar(&o.shunt, "shunt", "", "shunt binary (default: built from this repository)")
	flag.StringVar(&o.shuntArgs, "shunt-args", "", "more arguments of shunt run, separated by spaces")
	flag.StringVar(&o.link, "link", "", "pinned XDP link of a running instance, on the clients' side")
	flag.StringVar(&o.reverseLink, "reverse-link", "", "pinned XDP link on the servers' side (default: --link)")
	service := flag.String("service", "192.0.2.10:80", "virtual service, with --link")
	clients := flag.String("clients", "198.18.0.0/15", "source addresses of flows (RFC 2544 has a range for benchmarks)")
	flag.BoolVar(&o.ordered, "ordered", false, "send packets in the order in which flows were made, which suits caches, instead of a random one")
	flag.BoolVar(&o.features, "features", false, "add services to the measured one, so that the programs are loaded with every feature")
	flag.BoolVar(&o.json, "json", false, "print JSON")
	flag.BoolVar(&o.direct, "direct", false, "measure direct return instead of NAT")
	flag.StringVar(&o.katran, "katran", "", "with --direct: a checkout of github.com/facebookincubator/katran, which is measured beside dsr-ipip")
	ways := flag.String("forwardings", "dsr-l2,dsr-ipip,dsr-gue", "with --direct: ways of forwarding, comma separated")
	kinds := flag.String("traffic", "tcp4,tcp6,udp4", "with --direct: kinds of packets, comma separated")
	states := flag.String("slots", "settled,marked,transition", "with --direct: states of the slots, comma separated; all but settled for dsr-ipip and tcp4 only")
	flag.Parse()
	err := o.parseDirect(*ways, *kinds, *states)
	for _, text := range strings.Split(*flows, ",") {
		n, parseErr := strconv.ParseUint(text, 10, 32)
		if parseErr != nil || bits.OnesCount64(n) != 1 || n > flowLimit {
			err = errors.Join(err, fmt.Errorf("--flows %q: want a power of two up to %d", text, flowLimit))
		}
		o.flows = append(o.flows, uint32(n))
	}
	var serviceErr, clientsErr error
	o.service, serviceErr = netip.ParseAddrPort(*service)
	o.clients, clientsErr = netip.ParsePrefix(*clients)
	err = errors.Join(err, serviceErr, clientsErr)
	if err == nil && (!o.service.Addr().Is4() || !o.clients.Addr().Is4() || o.clients.Bits() > 16) {
		err = errors.New("--service and --clients: want IPv4, and at least 65536 clients")
	}
	if flag.NArg() > 0 {
		err = errors.Join(err, fmt.Errorf("unexpected argument %q", flag.Arg(0)))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "percall:", err)
		os.Exit(2)
	}
	return o
}

// parseDirect takes the lists of --direct.
func (o *options) parseDirect(ways, kinds, states string) error {
	var err error
	o.forwardings, o.slots = strings.Split(ways, ","), strings.Split(states, ",")
	for _, way := range o.forwardings {
		if !slices.Contains(forwardings, way) {
			err = errors.Join(err, fmt.Errorf("--forwardings %q: want some of %s", way, strings.Join(forwardings, ", ")))
		}
	}
	for _, kind := range strings.Split(kinds, ",") {
		if trafficNames[traffic(kind)] == "" {
			err = errors.Join(err, fmt.Errorf("--traffic %q: want some of tcp4, tcp6, udp4", kind))
		}
		o.traffics = append(o.traffics, traffic(kind))
	}
	for _, state := range o.slots {
		if _, ok := slotStates[state]; !ok {
			err = errors.Join(err, fmt.Errorf("--slots %q: want some of settled, marked, transition", state))
		}
	}
	if !o.direct && o.katran != "" {
		err = errors.Join(err, errors.New("--katran needs --direct: add it"))
	}
	if o.direct && o.link != "" {
		err = errors.Join(err, errors.New("--direct starts shunt itself: leave --link out"))
	}
	return err
}

// run measures every number of flows and prints the result.
func run(o options) error {
	var all []figures
	for _, flows := range o.flows {
		f, err := measureFlows(o, flows)
		if err != nil {
			return fmt.Errorf("%d flows: %w", flows, err)
		}
		all = append(all, f)
	}
	if o.json {
		encoder := json.NewEncoder(os.Stdout)
		encoder.SetIndent("", "  ")
		return encoder.Encode(all)
	}
	if err := printHead("NAT packet"); err != nil {
		return err
	}
	order := "random order"
	if o.ordered {
		order = "the order in which they were made"
	}
	fmt.Printf("CPU %d, minimum of %d rounds, established IPv4 TCP flows in %s, nanoseconds per packet\n\n", o.cpu, o.rounds, order)
	fmt.Println("| flows | front + drop | front + push | front + find | net / (front + push) | front + shunt, to backend | net | net / (front + push) | front + shunt, to client | net | net / (front + push) | configuration |")
	fmt.Println("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|")
	for _, f := range all {
		fmt.Printf("| %d | %.0f | %.0f | %.0f | %s | %.0f | %.0f | %s | %.0f | %.0f | %s | %s |\n",
			f.Flows, f.FrontDrop, f.FrontPush, f.FrontFind, f.FindRatio, f.Forward, f.ForwardNet, f.ForwardRatio, f.Reverse, f.ReverseNet, f.ReverseRatio, f.Config)
	}
	fmt.Println("\nFind is the least that a program with a table of flows can do: it looks up one entry in a table with the size and the number of entries of shunt's table, and reads it.")
	fmt.Println(howRatio)
	fmt.Println("\nProgram:", all[len(all)-1].Program)
	fmt.Print("\n", judgeNAT(all))
	return nil
}

// printHead writes the title of the table, the machine, and the command that made it.
func printHead(what string) error {
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	fmt.Printf("# Cost of a %s, %s\n\n%s. %s\n\n    %s\n\n", what, m.Date, m, m.Faults(), machine.Command("bench/percall"))
	return nil
}

// natAims are the aims of NAT by the number of flows: net cost over front + push.
var natAims = map[uint32]float64{1: 1.5, 65536: 4}

// judgeNAT compares rows with the aims, if there is one for their number of flows.
func judgeNAT(all []figures) string {
	var text strings.Builder
	for _, f := range all {
		aim, ok := natAims[f.Flows]
		if !ok {
			continue
		}
		for _, way := range []struct {
			name string
			net  float64
		}{{"to the backend", f.ForwardRatio.Median}, {"to the client", f.ReverseRatio.Median}} {
			fmt.Fprintf(&text, "NAT, %d flows, %s: net is %.2f of front + push (aim: at most %.2f, %s)\n",
				f.Flows, way.name, way.net, aim, verdict(way.net <= aim))
		}
	}
	return text.String()
}

// howRatio stands below every table.
const howRatio = "Ratios are medians of the rounds' own ratios, with their quartiles; nanoseconds are minima of all rounds."

// measureFlows finds the program, makes the flows, and measures.
func measureFlows(o options, flows uint32) (f figures, err error) {
	s, err := findSubject(o, flows)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	started := time.Now()
	var forward, reverse []packetBytes
	err = s.in(func() error {
		forward, reverse, err = s.makeFlows(o.clients, flows)
		return err
	})
	if err != nil {
		return f, fmt.Errorf("make flows: %w", err)
	}
	keys, err := entryKeys(reverse, forward) // a backend's entry comes first: it claims the port
	if err != nil {
		return f, err
	}
	if !o.ordered {
		shuffle(forward, reverse)
	}
	fmt.Fprintf(os.Stderr, "%d flows made in %s\n", flows, time.Since(started).Round(time.Millisecond))
	f = figures{Flows: flows, Config: s.config, Program: s.describe()}
	err = s.in(func() error { return s.measure(o, forward, reverse, keys, &f) })
	return f, err
}
