package load

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lab"
	lb "github.com/shunt-lb/shunt/internal/lb/command"
)

// childVariable makes this binary the command line of shunt; its value is "shunt", or the name
// of a watched or broken daemon (child_test.go).
const childVariable = "SHUNT_LOAD_CHILD"

var (
	seedFlag  = flag.Uint64("seed", 0, "seed of random moments and changes; 0: a new one each time")
	scaleFlag = flag.Float64("scale", 0, "part of the full traffic; 0: all of it with SHUNT_SOAK, otherwise a tenth")
)

func TestMain(m *testing.M) {
	switch how := os.Getenv(childVariable); how {
	case "":
		flag.Parse()
		os.Exit(m.Run())
	case "shunt":
		os.Exit(cli.Main(lb.Alone, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	default:
		os.Exit(runWatched(how))
	}
}

// soak reports whether there is time for the long versions.
var soak = os.Getenv("SHUNT_SOAK") != ""

// scale is the amount of traffic: all of it, or as much as a busy machine of two CPUs carries
// beside other tests.
func scale() Amount {
	switch {
	case *scaleFlag != 0:
		return Full.Scaled(*scaleFlag)
	case soak:
		return Full
	}
	return Full.Scaled(0.1)
}

// times is the number of repetitions.
func times(long, short int) int {
	if soak {
		return long
	}
	return short
}

const (
	backendCount = 4
	// roomy is an MTU with room for 1500 bytes and the outer headers between balancer and
	// backends.
	roomy = 1600
	// patience bounds waits that take a second on an idle machine.
	patience = time.Minute
)

// setup describes the start of a daemon.
type setup struct {
	how      string   // "shunt", or see child_test.go
	args     []string // more arguments
	before   []string // another program that starts it
	limits   string   // of the configuration, if the test needs special ones
	settings string   // of the configuration, if there are more
	amount   Amount   // of traffic, if it is not the usual one
	quiet    time.Duration
}

// bed is a network with shunt in it, a service of each sort, and a way past shunt:
//
//	client ─┬─ lb ─── switch ─┬─ b1 … b4     shunt decap takes the outer header off
//	   eth1 └─────────────────┼
//	                          └─ reference   the clock's server; no program of shunt's there
type bed struct {
	*lab.Topology
	t         *testing.T
	reference netip.AddrPort
	instance  string
	socket    string
	path      string // of the configuration file
	setup
	daemon *lab.Process
	others []*lab.Process
	logs   []string // of daemons that have ended
}

// traffic is the amount of traffic.
func (s setup) traffic() Amount {
	if s.amount == (Amount{}) {
		return scale()
	}
	return s.amount
}

func newBed(t *testing.T) *bed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces and BPF need root: run the tests with sudo")
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	topology, err := lab.Build(ctx, lab.Options{ID: fmt.Sprintf("l%d", os.Getpid()), Layout: lab.TwoArm, Backends: backendCount, MTU: roomy})
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	b := &bed{Topology: topology, t: t, instance: fmt.Sprintf("load-%d", os.Getpid()),
		socket: filepath.Join(folder, "shunt.sock"), path: filepath.Join(folder, "shunt.yaml")}
	t.Cleanup(b.close)
	b.must(b.Shortcut(), b.Client.SetMTU("eth0", 1500), b.addReference())
	for _, backend := range b.Backends {
		b.must(b.serve(backend))
	}
	for _, backend := range b.Backends {
		b.others = append(b.others, b.decap(backend))
	}
	for _, p := range b.others {
		b.awaits(p, "undoes all of it")
	}
	return b
}

func (b *bed) must(errs ...error) {
	b.t.Helper()
	if err := errors.Join(errs...); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bed) addReference() error {
	host, err := b.AddHost("reference")
	if err != nil {
		return err
	}
	address := netip.MustParsePrefix("10.0.0.99/24")
	_, err = host.ServeHTTP(":80", host.Name())
	b.reference = netip.AddrPortFrom(address.Addr(), 80)
	return errors.Join(err, b.Connect(lab.End{Host: host, Interface: "eth0", IPv4: address}, lab.End{Host: b.Switch, Interface: "reference"}, lab.Cable{MTU: roomy}),
		b.Switch.Plug("reference", "br0"), b.Ready(b.t.Context()))
}

// serve starts servers. UDP answers come from the address that a socket is bound to, so each
// address has a socket of its own; it may exist before the address.
func (b *bed) serve(backend *lab.Host) error {
	err := errors.Join(backend.SetSysctl("net.ipv4.ip_nonlocal_bind", "1"), backend.SetSysctl("net.ipv6.ip_nonlocal_bind", "1"))
	_, webErr := backend.ServeHTTP(":80", backend.Name())
	err = errors.Join(err, webErr)
	for _, address := range []netip.Addr{backend.Addr4(), backend.Addr6(), direct.vips[0], direct.vips[1]} {
		_, udpErr := backend.ServeUDP(netip.AddrPortFrom(address, 53).String(), backend.Name())
		err = errors.Join(err, udpErr)
	}
	return err
}

// decap runs `shunt decap` on a backend.
func (b *bed) decap(backend *lab.Host) *lab.Process {
	b.t.Helper()
	args := []string{"decap", "--interface", "eth0", "--from", "10.0.0.1", "--from", "2001:db8:1::1"}
	for _, vip := range direct.vips {
		args = append(args, "--vip", vip.String())
	}
	return b.spawn(backend, "shunt", args...)
}

// close ends everything, and shows logs if the test has failed.
func (b *bed) close() {
	if b.daemon != nil {
		b.end(syscall.SIGINT)
	}
	for _, p := range b.others {
		if err := p.End(syscall.SIGTERM, patience); err != nil {
			b.t.Errorf("shunt decap: %v\n%s", err, p.Log())
		}
	}
	if out, err := b.command(b.Balancer, "shunt", "detach", "--instance", b.instance).CombinedOutput(); err != nil && !bytes.Contains(out, []byte("nothing of it is on this machine")) {
		b.t.Errorf("shunt detach: %v\n%s", err, out)
	}
	if b.t.Failed() {
		for _, log := range b.logs[max(0, len(b.logs)-3):] {
			b.t.Logf("the log of a daemon:\n%s", log)
		}
	}
	if err := os.Remove("/var/lib/shunt/" + b.instance + ".overrides.json"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		b.t.Error(err)
	}
	if err := b.Close(); err != nil {
		b.t.Error(err)
	}
}

func (b *bed) command(h *lab.Host, how string, args ...string) *lab.Command {
	self, err := os.Executable()
	if err != nil {
		panic(err) // Linux always knows
	}
	c := h.Command(context.Background(), self, args...)
	c.Env = append(os.Environ(), childVariable+"="+how)
	return c
}

func (b *bed) spawn(h *lab.Host, how string, args ...string) *lab.Process {
	b.t.Helper()
	p, err := b.command(h, how, args...).Spawn()
	if err != nil {
		b.t.Fatal(err)
	}
	return p
}

// awaits waits until a process has printed a text.
func (b *bed) awaits(p *lab.Process, text string) {
	b.t.Helper()
	eventually(b.t, fmt.Sprintf("%q from %s", text, strings.Join(p.Args[1:], " ")), func() error {
		if strings.Contains(p.Log(), text) {
			return nil
		}
		select {
		case <-p.Ended:
			b.t.Fatalf("%s ended: %v\n%s", strings.Join(p.Args[1:], " "), p.Err(), p.Log())
		default:
		}
		return errors.New(p.Log())
	})
}

// eventually waits for a condition that another process or goroutine brings about.
func eventually(t *testing.T, what string, ready func() error) {
	t.Helper()
	within(t, patience, what, ready)
}

func within(t *testing.T, timeout time.Duration, what string, ready func() error) {
	t.Helper()
	end := time.Now().Add(timeout)
	for {
		err := ready()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s: %v", what, timeout, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// launch starts the daemon without waiting.
func (b *bed) launch() {
	b.t.Helper()
	args := append([]string{"run", "--config", b.path, "--instance", b.instance, "--socket", b.socket}, b.args...)
	c := b.command(b.Balancer, b.how, args...)
	if len(b.before) > 0 {
		whole := b.Balancer.Command(context.Background(), b.before[0], append(slices.Clone(b.before[1:]), c.Args...)...)
		whole.Env = c.Env
		c = whole
	}
	p, err := c.Spawn()
	b.must(err)
	b.daemon = p
}

// start starts the daemon and waits until it has adopted or applied everything.
func (b *bed) start() {
	b.t.Helper()
	b.launch()
	b.awaits(b.daemon, "msg=running")
}

// end ends the daemon with a signal.
func (b *bed) end(signal syscall.Signal) {
	b.t.Helper()
	if err := b.daemon.End(signal, patience); err != nil {
		b.t.Errorf("shunt run: %v\n%s", err, b.daemon.Log())
	}
	b.logs = append(b.logs, b.daemon.Log())
	b.daemon = nil
}

// write replaces the configuration file.
func (b *bed) write(c config) {
	b.t.Helper()
	b.must(os.WriteFile(b.path+".new", []byte(c.file(b)), 0o644), os.Rename(b.path+".new", b.path))
}

// reload applies the file.
func (b *bed) reload() (*shuntv1.ReloadResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return control.NewClient(b.socket).Reload(ctx)
}

// apply writes and applies a configuration under the load, and tells the load beforehand which
// flows it may break.
func (b *bed) apply(l *Load, name string, before, after config) *shuntv1.ReloadResponse {
	b.t.Helper()
	defer l.Event(name, before.mayBreak(after)...)()
	b.write(after)
	result, err := b.reload()
	if err != nil || !result.Applied {
		b.t.Fatalf("%s: reload: %v, %+v\n%s\n%s", name, err, result, after.file(b), b.daemon.Log())
	}
	return result
}

// conditions returns the daemon's conditions, by code, as text.
func (b *bed) conditions() (map[string]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	status, err := control.NewClient(b.socket).Status(ctx)
	found := map[string]string{}
	for _, c := range status.GetDaemon().GetConditions() {
		text, _ := json.Marshal(c)
		found[c.Code] += string(text)
	}
	return found, err
}

// load starts the traffic to all services.
func (b *bed) load(amount Amount) *Load {
	b.t.Helper()
	var targets []Target
	for _, s := range []service{translated, direct} {
		for _, vip := range s.vips {
			targets = append(targets, Target{s.name, netip.AddrPortFrom(vip, 80), netip.AddrPortFrom(vip, 53)})
		}
	}
	l, err := Start(context.Background(), Options{Client: b.Client, Targets: targets, Clock: b.reference, Amount: amount})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { l.End() }) // before the bed goes; a second call does no harm
	return l
}
