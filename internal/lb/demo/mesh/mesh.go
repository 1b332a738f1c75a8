// Package mesh shows machines that are balancers and servers at once, behind a router with ECMP, to
// a user who has nothing but the binary:
//
//	client ─── router (ECMP, both hash policies) ─── switch ─┬─ m1   on each: shunt run, a child
//	                                                         ├─ m2   process, and a web server
//	                                                         ├─ m3
//	                                                         └─ m4   added later
//
// Hundreds of connections stay open while the router leads their packets to other machines, a machine is
// added, one is drained, and one dies. Every line that claims something is a Claim, checked in this run.
package mesh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/story"
)

const (
	// patience limits every wait for something that takes milliseconds.
	patience = 10 * time.Second
	// connections are opened for each hash policy, and stay open.
	connections = 150
	// clients are the addresses that they come from: hash policy 0 knows nothing else of a client.
	clients = 25
	// first are the machines of the beginning; one more is added.
	first = 3

	webPort = 80
	// packetMTU is the MTU of the machines' segment, with room for 1500 bytes in an outer header.
	packetMTU = 1600
)

// Options say how the demo runs.
type Options struct {
	Executable string    // the shunt binary that plays the balancers
	Out        io.Writer // the story
}

// Facts are the demo's findings; their JSON is `shunt demo mesh -o json`.
type Facts struct {
	OK      bool         `json:"ok"` // every claim is true
	ID      string       `json:"id"`
	Seconds float64      `json:"seconds"`
	Config  string       `json:"config"`
	Rounds  []Round      `json:"rounds"`
	Claims  story.Claims `json:"claims"`
}

// Round counts the outcomes of the connections in a step.
type Round struct {
	Step string `json:"step"` // the step before it
	// Entered are the packets that each machine balanced in the step, by its name, for any machine's
	// server; TakenOut are the packets that came to it in an outer header.
	Entered  map[string]uint64 `json:"entered"`
	TakenOut map[string]uint64 `json:"taken_out"`
	// Served are the connections that each machine's server answered, Moved are connections that another server
	// answered than before, and Broken are connections that none answered, by the machine that had served them.
	Served map[string]int `json:"served"`
	Moved  int            `json:"moved"`
	Broken map[string]int `json:"broken"`
}

// machine is one of the mesh.
type machine struct {
	*lab.Host
	daemon  *lab.Process
	counted counters // when last looked at
}

// demo is one run.
type demo struct {
	*story.Teller
	opts     Options
	facts    *Facts
	lab      *lab.Mesh
	folder   string // of configurations, sockets and overrides
	machines []*machine
	open     []*connection
}

// Run runs the whole demo. It cleans up before it returns. A failed step or an untrue claim is a claim that
// makes Facts.OK false. The error is ctx's, if ctx ended, and that of a cleaning up that failed.
func Run(parent context.Context, opts Options) (*Facts, error) {
	d := &demo{Teller: story.NewTeller(opts.Out), opts: opts, facts: &Facts{Rounds: []Round{}}}
	begin := time.Now()
	ctx, cancel := context.WithTimeoutCause(parent, 2*time.Minute, errors.New("the demo took longer than two minutes"))
	defer cancel()
	fault := d.story(ctx)
	if fault != nil && parent.Err() == nil {
		d.Claim(false, "%v", fault)
		for _, m := range d.machines {
			if m.daemon != nil {
				d.Say("  the log of %s:\n%s\n", m.Name(), m.daemon.Log())
			}
		}
	}
	err := errors.Join(parent.Err(), d.takeDown())
	d.facts.Seconds = time.Since(begin).Seconds()
	d.facts.Claims = d.Claims
	d.facts.OK = err == nil && d.Claims.Untrue() == 0
	return d.facts, err
}

// story runs the steps in the order in which a reader sees them.
func (d *demo) story(ctx context.Context) error {
	return d.Tell(ctx,
		story.Step("The network", d.build),
		story.Step("One configuration for all machines", d.start),
		story.Step("Connections, with the router's hash policy 0: addresses", d.openByAddress),
		story.Step("More connections, with hash policy 1: addresses and ports", d.openByPort),
		story.Step("The router leads everything to m1, and then to m2 and m3", d.move),
		story.Step("A machine is added: m4, at first as a balancer alone", d.join),
		story.Step("The server of m4 becomes a backend", d.add),
		story.Step("The server of m1 is drained", d.drain),
		story.Step("m2 dies (its network card, and shunt by SIGKILL)", d.die),
		story.Step("SIGTERM", d.stop),
	)
}

func (d *demo) build(ctx context.Context) (err error) {
	if d.lab, err = lab.BuildMesh(ctx, "", first+1, packetMTU); err != nil {
		return err
	}
	d.facts.ID = d.lab.ID()
	for _, h := range d.lab.Machines {
		d.machines = append(d.machines, &machine{Host: h})
	}
	d.Say("  client ─── router ─── switch ─┬─ m1  10.0.0.1\n")
	d.Say("                                ├─ m2  10.0.0.2   each: shunt run, and a web server\n")
	d.Say("                                ├─ m3  10.0.0.3\n")
	d.Say("                                └─ m4  10.0.0.4   is added later\n\n")
	if d.folder, err = os.MkdirTemp("", "shunt-"+d.facts.ID+"-"); err != nil {
		return err
	}
	for n := range clients {
		if err := d.lab.Client.AddAddress("eth0", clientPrefix(n)); err != nil {
			return err
		}
	}
	for _, m := range d.machines {
		if _, err := m.ServeHTTP(fmt.Sprintf(":%d", webPort), m.Name()); err != nil {
			return err
		}
	}
	d.Claim(true, "%d namespaces (%s, …); the client has %d addresses more, and the web servers listen", len(d.lab.Hosts()), d.lab.Client.Namespace(), clients)
	return nil
}

// config returns the file of all machines, with the given path of the socket.
func (d *demo) config(socket string, machines []*machine) string {
	var backends []string
	for _, m := range machines {
		backends = append(backends, fmt.Sprintf("{name: %s, address: %s}", m.Name(), m.Addr4()))
	}
	return fmt.Sprintf(`interfaces: [{name: eth0}]
decapsulation: {from: [10.0.0.0/24]}   # the other machines
services:
  - name: web
    address: %s
    port: %d
    forwarding: dsr-ipip
    announce: none                     # the router's routes lead to the machines
    health: {tcp: {}, interval: 300ms, timeout: 300ms, rise: 1, fall: 3}
    backends: [%s]
api: {socket: %s}
`, lab.VIP4, webPort, strings.Join(backends, ", "), socket)
}

// start starts `shunt run` on the first machines.
func (d *demo) start(ctx context.Context) error {
	d.facts.Config = d.config("…", d.machines[:first])
	d.Say("%s\n\n", story.Indent(d.facts.Config))
	begin := time.Now()
	for _, m := range d.machines[:first] {
		if err := d.startMachine(m, d.machines[:first]); err != nil {
			return err
		}
	}
	if err := d.awaitUp(ctx, d.machines[:first], first); err != nil {
		return err
	}
	d.Claim(true, "%d balancers forward, and each has found all servers up, %d ms after the first one was started", first, time.Since(begin).Milliseconds())
	return d.lead(d.machines[:first]...)
}

func (d *demo) startMachine(m *machine, all []*machine) (err error) {
	if err := d.write(m, all); err != nil {
		return err
	}
	cmd := m.Command(context.Background(), d.opts.Executable, "run", "--config", d.path(m), "--instance", d.instance(m))
	cmd.Env = append(os.Environ(), "SHUNT_SOCKET=", "STATE_DIRECTORY="+d.folder)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the demo, which then ends it
	m.daemon, err = cmd.Spawn()
	return err
}

func (d *demo) write(m *machine, all []*machine) error {
	if err := os.WriteFile(d.path(m), []byte(d.config(d.socket(m), all)), 0o600); err != nil {
		return fmt.Errorf("write the configuration of %s: %w", m.Name(), err)
	}
	return nil
}

func (d *demo) instance(m *machine) string { return "mesh-" + d.facts.ID + "-" + m.Name() }
func (d *demo) path(m *machine) string     { return filepath.Join(d.folder, m.Name()+".yaml") }
func (d *demo) socket(m *machine) string   { return filepath.Join(d.folder, m.Name()+".sock") }

// lead makes the router lead the VIP to these machines.
func (d *demo) lead(to ...*machine) error {
	hosts, command := make([]*lab.Host, len(to)), "ip route replace "+lab.VIP4.String()
	for i, m := range to {
		hosts[i] = m.Host
		command += " nexthop via " + m.Addr4().String()
	}
	d.Say("  router# %s\n", command)
	return d.lab.Lead(lab.VIP4, hosts...)
}

func (d *demo) openByAddress(ctx context.Context) error { return d.openAll(ctx, 0) }
func (d *demo) openByPort(ctx context.Context) error    { return d.openAll(ctx, 1) }

// openAll opens connections under a hash policy of the router.
func (d *demo) openAll(ctx context.Context, policy int) error {
	d.Say("  router# sysctl net.ipv4.fib_multipath_hash_policy=%d\n\n", policy)
	if err := d.lab.SetHashPolicy(policy); err != nil {
		return err
	}
	if _, _, err := d.count(ctx, d.machines[:first]); err != nil {
		return err
	}
	opened, failed := d.connect(ctx, connections)
	d.open = append(d.open, opened...)
	r, err := d.round(ctx, fmt.Sprintf("opened with hash policy %d", policy), d.machines[:first], opened)
	if err != nil {
		return err
	}
	d.Claim(failed == nil, "%d of %d connections are open%s", len(opened), connections, because(failed))
	d.Claim(len(r.Entered) == first && len(r.Served) == first, "every machine balances some of them, and every machine serves some")
	d.Claim(sum(r.TakenOut) > 0, "%d packets went on to the machine whose server has the connection, by IPIP", sum(r.TakenOut))
	return nil
}

// move changes the router's paths, so that most packets come to another machine than before.
func (d *demo) move(ctx context.Context) error {
	for _, to := range [][]*machine{d.machines[:1], d.machines[1:first], d.machines[:first]} {
		if err := d.lead(to...); err != nil {
			return err
		}
		r, err := d.round(ctx, "led to "+namesOf(to), d.machines[:first], d.open)
		if err != nil {
			return err
		}
		d.Claim(len(r.Broken) == 0 && r.Moved == 0 && len(r.Entered) == len(to),
			"%d of %d connections go on at their server, with all packets coming in by %s", sum(r.Served), len(d.open), namesOf(to))
	}
	return nil
}

// join starts the balancer of another machine, with the file of the others, and has the router lead packets
// to it. Its table is theirs. Had it a table with its own server from the start, it would know nothing of
// the connections that the change of the table concerns, as the others do.
func (d *demo) join(ctx context.Context) error {
	if err := d.startMachine(d.machines[first], d.machines[:first]); err != nil {
		return err
	}
	if err := d.awaitUp(ctx, d.machines, first); err != nil {
		return err
	}
	if err := d.lead(d.machines...); err != nil {
		return err
	}
	r, err := d.round(ctx, "m4 balances", d.machines, d.open)
	if err != nil {
		return err
	}
	d.Claim(len(r.Broken) == 0 && r.Moved == 0, "%d of %d connections go on at their server", sum(r.Served), len(d.open))
	d.Claim(r.Entered["m4"] > 0, "m4 gets %d packets of them from the router, and passes them on to their servers", r.Entered["m4"])
	return nil
}

// add makes its server a backend, at the machine itself first: it has the VIP before packets are sent to it.
func (d *demo) add(ctx context.Context) error {
	for _, m := range []*machine{d.machines[3], d.machines[0], d.machines[1], d.machines[2]} {
		if err := d.write(m, d.machines); err != nil {
			return err
		}
		if err := d.shunt(ctx, m, "reload", "--socket", d.socket(m)); err != nil {
			return err
		}
	}
	if err := d.awaitUp(ctx, d.machines, first+1); err != nil {
		return err
	}
	d.Say("  m4, m1, m2, m3# shunt reload           # {name: m4, address: 10.0.0.4} is new in backends\n\n")
	r, err := d.round(ctx, "m4 serves", d.machines, d.open)
	if err != nil {
		return err
	}
	d.Claim(len(r.Broken) == 0 && r.Moved == 0, "%d of %d connections go on at their server", sum(r.Served), len(d.open))
	return d.claimNew(ctx, d.machines, func(on map[string]int) (bool, string) {
		return on["m4"] > 0, fmt.Sprintf("m4 serves %d of them", on["m4"])
	})
}

// claimNew opens new connections, and closes them again.
func (d *demo) claimNew(ctx context.Context, machines []*machine, judge func(on map[string]int) (bool, string)) error {
	opened, failed := d.connect(ctx, connections)
	on := map[string]int{}
	for _, c := range opened {
		on[c.server]++
		_ = c.Close()
	}
	ok, text := judge(on)
	d.Claim(failed == nil && ok, "%d of %d new connections are open: %s%s", len(opened), connections, text, because(failed))
	_, _, err := d.count(ctx, machines) // they are no packets of the next round
	return err
}

// drain drains one machine's server on all balancers.
func (d *demo) drain(ctx context.Context) error {
	for _, m := range d.machines {
		if err := d.shunt(ctx, m, "backend", "drain", "m1", "--socket", d.socket(m)); err != nil {
			return err
		}
	}
	d.Say("  m1, m2, m3, m4# shunt backend drain m1\n\n")
	r, err := d.round(ctx, "m1 drained", d.machines, d.open)
	if err != nil {
		return err
	}
	d.Claim(len(r.Broken) == 0 && r.Moved == 0, "%d of %d connections go on at their server, %d of them at m1", sum(r.Served), len(d.open), r.Served["m1"])
	return d.claimNew(ctx, d.machines, func(on map[string]int) (bool, string) { return on["m1"] == 0, "m1 serves none of them" })
}

// die takes a machine away.
func (d *demo) die(ctx context.Context) error {
	dead, left := d.machines[1], []*machine{d.machines[0], d.machines[2], d.machines[3]}
	if err := errors.Join(dead.SetUp("eth0", false), dead.daemon.End(syscall.SIGKILL, patience)); err != nil {
		return err
	}
	begin := time.Now()
	if err := d.awaitUp(ctx, left, first); err != nil {
		return err
	}
	d.Claim(true, "the others find m2's server down within %d ms", time.Since(begin).Milliseconds())
	if err := d.lead(left...); err != nil {
		return err
	}
	r, err := d.round(ctx, "m2 dead", left, d.open)
	if err != nil {
		return err
	}
	d.Claim(len(r.Broken) == 1 && r.Broken["m2"] > 0 && r.Moved == 0,
		"only the connections that m2 served broke: %d; the %d others go on at their server, whichever machine their packets came in by", r.Broken["m2"], sum(r.Served))
	return d.claimNew(ctx, left, func(on map[string]int) (bool, string) { return on["m2"] == 0, "none waits for m2" })
}

// stop ends the daemons as a user would, and looks for objects that they have left.
func (d *demo) stop(context.Context) error {
	var left []string
	for _, m := range []*machine{d.machines[0], d.machines[2], d.machines[3]} {
		if err := m.daemon.End(syscall.SIGTERM, patience); err != nil {
			return fmt.Errorf("end shunt on %s: %w", m.Name(), err)
		}
		found, err := remains(m)
		if err != nil {
			return err
		}
		left = append(left, found...)
	}
	d.Claim(len(left) == 0, "no machine has a program on its interface, or the VIP, any more%s", story.Found(left))
	return nil
}

// takeDown ends and removes everything.
func (d *demo) takeDown() error {
	if d.lab == nil {
		return nil
	}
	for _, c := range d.open {
		_ = c.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	var errs []error
	for _, m := range d.machines {
		if m.daemon == nil {
			continue
		}
		_ = m.daemon.End(syscall.SIGTERM, patience) // detach finds the remains of a daemon that had to be killed
		if _, err := os.Stat(kernel.Directory(kernel.DefaultPinRoot, d.instance(m))); err == nil {
			errs = append(errs, d.shunt(ctx, m, "detach", "--instance", d.instance(m)))
		}
		locks, _ := filepath.Glob("/run/shunt/" + d.instance(m) + ".*")
		for _, path := range locks {
			errs = append(errs, os.Remove(path))
		}
	}
	if d.folder != "" {
		errs = append(errs, os.RemoveAll(d.folder))
	}
	if err := errors.Join(append(errs, d.lab.Close())...); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	return nil
}

// show prints a round as a table.
func (d *demo) show(r Round, machines []*machine) {
	w := tabwriter.NewWriter(d.Out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "  MACHINE\tPACKETS BALANCED\tTAKEN OUT OF IPIP\tCONNECTIONS SERVED\tBROKEN")
	for _, m := range d.machines {
		name := m.Name()
		fmt.Fprintf(w, "  %s\t%d\t%d\t%d\t%d\n", name, r.Entered[name], r.TakenOut[name], r.Served[name], r.Broken[name])
		if len(machines) == first && machines[first-1] == m {
			break // m4 is not there yet
		}
	}
	_ = w.Flush() // a reader who has gone is noticed elsewhere
	d.Say("\n")
}
