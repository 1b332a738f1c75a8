// Package net runs shunt as its users do, a process with a configuration file, between
// real sockets in network namespaces. The networks are those of internal/lab, with
// checksum offload on as every veth has it, unless a test says otherwise.
//
// The shunt process is this test binary again: it becomes the command line if SHUNT_NET_CHILD is set. So the tests need
// no compiler, and also run on a machine that has only the binary.
//
// SHUNT_SOAK=1 makes transfers and waits longer; -short makes transfers shorter and patience longer, for emulated
// machines; the code is the same.
package net

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lab"
	lb "github.com/shunt-lb/shunt/internal/lb/command"
)

const childVariable = "SHUNT_NET_CHILD"

func TestMain(m *testing.M) {
	if mounts := os.Getenv(mountsVariable); mounts != "" {
		enterMounts(mounts)
	}
	if os.Getenv(childVariable) != "" {
		becomeNext()
		becomeDaemon()
		os.Exit(cli.Main(lb.Alone, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	flag.Parse()
	if testing.Short() {
		patience = 6
		answerTimeout *= patience
	}
	os.Exit(m.Run())
}

// soak reports whether there is time for the long versions.
var soak = os.Getenv("SHUNT_SOAK") != ""

// patience multiplies time limits; it is 1 or, with -short, more.
var patience time.Duration = 1

// answerTimeout bounds requests that take milliseconds when they work, and 7 s if a SYN is lost three times (RFC 6298,
// 2.1 and 5.5: sent again after 1, 2 and 4 s).
var answerTimeout = 10 * time.Second

// size is the number of bytes of a transfer, from the megabytes of full and of short tests.
func size(full, short int64) int64 {
	if testing.Short() {
		return short << 20
	}
	return full << 20
}

// bed is a network with shunt in it.
type bed struct {
	*lab.Topology
	t        *testing.T
	instance string
	socket   string
	path     string // path of the configuration file
	config   string // its text
	daemon   *process
	others   []*process // of other hosts; ended with the bed
	env      []string   // of the daemon and of commands on the balancer, besides the test's own
}

var beds atomic.Int64

// newBed builds a network whose backends serve HTTP on 8080 and 8050, and UDP on 5353 and
// 8050, over both families. shunt is not started.
func newBed(t *testing.T, options lab.Options) *bed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces and BPF need root: run the tests with sudo")
	}
	t.Parallel() // beds share nothing but the machine, and mostly wait
	n := beds.Add(1)
	options.ID = fmt.Sprintf("n%dx%d", os.Getpid(), n)
	topology, err := lab.Build(within(t, 20*time.Second), options)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	b := &bed{Topology: topology, t: t,
		instance: fmt.Sprintf("net-%d-%d", os.Getpid(), n),
		socket:   filepath.Join(folder, "shunt.sock"), path: filepath.Join(folder, "shunt.yaml")}
	t.Cleanup(b.close)
	for _, backend := range b.Backends {
		b.serve(backend)
	}
	return b
}

func (b *bed) serve(backend *lab.Host) {
	b.t.Helper()
	for _, address := range []string{":8080", ":8050"} {
		if _, err := backend.ServeHTTP(address, backend.Name()); err != nil {
			b.t.Fatal(err)
		}
	}
	for _, address := range []string{":5353", ":8050"} {
		if _, err := backend.ServeUDP(address, backend.Name()); err != nil {
			b.t.Fatal(err)
		}
	}
}

// close ends the daemon as an operator would, and removes everything that a test has left.
func (b *bed) close() {
	if b.daemon != nil {
		if b.t.Failed() {
			_, status := b.shunt("status", "--instance", b.instance, "--socket", b.socket)
			b.t.Logf("status:\n%s", status)
		}
		if err := b.daemon.end(syscall.SIGTERM); err != nil {
			b.t.Errorf("shunt run: %v", err)
		}
		if b.t.Failed() {
			b.t.Logf("the log of shunt:\n%s", b.daemon.log())
		}
	}
	for _, p := range b.others {
		if err := p.end(syscall.SIGTERM); err != nil {
			b.t.Errorf("%s: %v\n%s", p, err, p.log())
		}
	}
	if code, out := b.shunt("detach", "--instance", b.instance); code != 0 && !strings.Contains(out, "nothing of it is on this machine") {
		b.t.Errorf("shunt detach: exit code %d\n%s", code, out)
	}
	if err := os.Remove(b.overrides()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		b.t.Error(err)
	}
	if err := b.Close(); err != nil {
		b.t.Error(err)
	}
}

// overrides is the file with the operators' commands. Its folder is the machine's, and it outlives instance and daemon.
func (b *bed) overrides() string { return "/var/lib/shunt/" + b.instance + ".overrides.json" }

// within returns a context with this time limit, multiplied by patience.
func within(t *testing.T, timeout time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience*timeout)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits, with patience, for a condition that another process brings about. It pauses as long as the last
// check took, within limits: a check that starts a process takes CPU time from the awaited process.
func eventually(t *testing.T, timeout time.Duration, what string, ready func() error) {
	t.Helper()
	timeout *= patience
	end := time.Now().Add(timeout)
	for {
		began := time.Now()
		err := ready()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s: %v", what, timeout, err)
		}
		<-time.After(min(max(time.Since(began), 20*time.Millisecond), 200*time.Millisecond))
	}
}

// command is shunt with arguments in a host's namespace.
func command(h *lab.Host, args ...string) *lab.Command {
	self, err := os.Executable()
	if err != nil {
		panic(err) // Linux always knows
	}
	c := h.Command(context.Background(), self, args...)
	c.Env = append(os.Environ(), childVariable+"=1")
	return c
}

// shunt runs a command to its end on the balancer.
func (b *bed) shunt(args ...string) (code int, output string) {
	b.t.Helper()
	c := command(b.Balancer, args...)
	c.Env = append(c.Env, b.env...)
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		b.t.Errorf("shunt %s: %v", strings.Join(args, " "), err)
		return -1, string(out)
	}
	if exit != nil {
		return exit.ExitCode(), string(out)
	}
	return 0, string(out)
}

// process is a running `shunt run`, or another command that does not end by itself.
type process struct {
	*lab.Process
	command *lab.Command
	ended   <-chan struct{}
}

func (p *process) String() string { return strings.Join(p.command.Args[1:], " ") }

func (p *process) log() string { return p.Log() }

// end sends a signal and waits. A process that has ended is left as it is.
func (p *process) end(signal syscall.Signal) error { return p.End(signal, patience*20*time.Second) }

// launch starts `shunt run` without waiting.
func (b *bed) launch(args ...string) *process {
	b.t.Helper()
	return b.spawnWith(b.env, b.Balancer, append([]string{"run", "--config", b.path, "--instance", b.instance, "--socket", b.socket}, args...)...)
}

// spawn starts shunt on a host without waiting.
func (b *bed) spawn(h *lab.Host, args ...string) *process { return b.spawnWith(nil, h, args...) }

func (b *bed) spawnWith(env []string, h *lab.Host, args ...string) *process {
	b.t.Helper()
	c := command(h, args...)
	c.Env = append(c.Env, env...)
	return starts(b.t, c)
}

// spawn starts shunt on a host, for a test without a bed.
func spawn(t *testing.T, h *lab.Host, args ...string) *process {
	t.Helper()
	return starts(t, command(h, args...))
}

// starts starts a prepared command without waiting.
func starts(t *testing.T, c *lab.Command) *process {
	t.Helper()
	p, err := c.Spawn()
	if err != nil {
		t.Fatal(err)
	}
	return &process{Process: p, command: p.Command, ended: p.Ended}
}

// awaits waits until a process has printed a text.
func (b *bed) awaits(p *process, text string) {
	b.t.Helper()
	eventually(b.t, 30*time.Second, fmt.Sprintf("%q from shunt %s", text, p), func() error {
		if strings.Contains(p.log(), text) {
			return nil
		}
		select {
		case <-p.ended:
			b.t.Fatalf("shunt %s ended: %v\n%s", p, p.Err(), p.log())
		default:
		}
		return errors.New(p.log())
	})
}

// start runs shunt with the file and waits until it forwards.
func (b *bed) start(args ...string) {
	b.t.Helper()
	b.daemon = b.launch(args...)
	b.awaits(b.daemon, "msg=running")
}

// kill is kill -9.
func (b *bed) kill() {
	b.t.Helper()
	if err := b.daemon.end(syscall.SIGKILL); err != nil {
		b.t.Fatal(err)
	}
	b.daemon = nil
}

// keep stops a daemon that was started with --on-exit keep.
func (b *bed) keep() {
	b.t.Helper()
	if err := b.daemon.end(syscall.SIGTERM); err != nil {
		b.t.Fatalf("SIGTERM: %v\n%s", err, b.daemon.log())
	}
	b.daemon = nil
}

// write replaces the configuration file.
func (b *bed) write(config string) {
	b.t.Helper()
	b.config = config
	b.replaceFile(b.path, config)
}

// replaceFile replaces a file by renaming, as careful editors do.
func (b *bed) replaceFile(path, text string) {
	b.t.Helper()
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o644), os.Rename(path+".new", path)); err != nil {
		b.t.Fatal(err)
	}
}

// reload applies a configuration, which must succeed, and returns the output.
func (b *bed) reload(config string) string {
	b.t.Helper()
	b.write(config)
	code, out := b.shunt("reload", "--socket", b.socket)
	if code != 0 {
		b.t.Fatalf("shunt reload: exit code %d\n%s\nthe file:\n%s", code, out, config)
	}
	return out
}

// status has the fields of `shunt status -o json` that the tests read.
type status struct {
	Forwarding bool
	Daemon     *struct {
		PID        int
		Conditions []struct{ Code, Subject, Text, Remedy string }
		Transition int `json:"slots_in_transition"`
		Marked     int `json:"slots_marked"`
	}
	Silent     string    `json:"daemon_error"`
	Unattended time.Time `json:"unattended_since"`
	Attached   []attached
	Services   []service
	Backends   []serviceBackend
	Reasons    map[string]struct{ Packets, Bytes uint64 }
}

type attached struct {
	Interface, Mode string
	Missed          *uint64 `json:"frames_missed"`
	Chain           []struct{ Position, Name string }
}

type service struct {
	Name         string
	Frontends    []string
	PacketsIn    uint64 `json:"packets_in"`
	PacketsOut   uint64 `json:"packets_out"`
	FlowsCreated uint64 `json:"flows_created"`
	Backends     []serviceBackend
	openFlows
}

type serviceBackend struct {
	Address     string
	Name, State string
	Slots       int
	PacketsIn   uint64 `json:"packets_in"`
	openFlows
}

// openFlows is nil if the number is not known.
type openFlows struct {
	Open *uint64 `json:"flows_open"`
}

func (b *bed) status() status {
	b.t.Helper()
	code, out := b.shunt("status", "-o", "json", "--instance", b.instance, "--socket", b.socket)
	var s status
	if err := json.Unmarshal([]byte(out), &s); err != nil || code != 0 {
		b.t.Fatalf("shunt status: exit code %d, %v:\n%s", code, err, out)
	}
	return s
}

// condition returns a condition's text in `shunt status`, or "".
func (s status) condition(code string) string {
	if s.Daemon == nil {
		return ""
	}
	for _, c := range s.Daemon.Conditions {
		if c.Code == code {
			return c.Subject + ": " + c.Text + ": " + c.Remedy
		}
	}
	return ""
}

// at is an address and port as text.
func at(address netip.Addr, port uint16) string { return netip.AddrPortFrom(address, port).String() }

// vips are the addresses of the services, one of each family.
var vips = []netip.Addr{lab.VIP4, lab.VIP6}

// family names a subtest.
func family(a netip.Addr) string {
	if a.Is4() {
		return "ipv4"
	}
	return "ipv6"
}

// get sends a request over a new connection.
func (b *bed) get(client *http.Client, address string) (lab.Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	return lab.Get(ctx, client, address)
}

// askUDP sends a datagram from a new socket.
func (b *bed) askUDP(from *lab.Host, address string, payload []byte) (lab.Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
	defer cancel()
	return from.AskUDP(ctx, address, payload)
}

// settings are the varying parts of the configuration of most tests.
type settings struct {
	attach     string // auto if empty
	forwarding string // nat if empty
	announce   string // l2 if empty
	backends   []int  // numbers of the backends, from 1; all if empty
	limits     string // flows: 10000 if empty
	more       string // YAML under services, after the usual ones
}

// file writes a configuration: web on TCP 80 and dns on UDP 53, over both families.
func (b *bed) file(s settings) string {
	if s.attach == "" {
		s.attach = "auto"
	}
	if s.forwarding == "" {
		s.forwarding = "nat"
	}
	if s.announce == "" {
		s.announce = "l2"
	}
	if s.limits == "" {
		s.limits = "flows: 10000"
	}
	var text strings.Builder
	fmt.Fprintf(&text, "defaults: {forwarding: %s, announce: %s}\nlimits: {%s}\ninterfaces:\n", s.forwarding, s.announce, s.limits)
	for _, i := range b.Balancer.Interfaces() {
		fmt.Fprintf(&text, "  - {name: %s, attach: %s}\n", i.Name, s.attach)
	}
	text.WriteString("services:\n")
	for _, service := range []struct {
		name, protocol    string
		port, backendPort uint16
	}{{"web", "tcp", 80, 8080}, {"dns", "udp", 53, 5353}} {
		fmt.Fprintf(&text, "  - name: %s\n    address: [%s, %q]\n    port: %d\n    protocol: %s\n    backends:\n%s",
			service.name, lab.VIP4, lab.VIP6, service.port, service.protocol, b.backends(s.backends, service.backendPort))
	}
	return text.String() + s.more
}

// backends returns the lines of a list of backends; without numbers: all; port 0: without ports.
func (b *bed) backends(numbers []int, port uint16) string {
	if len(numbers) == 0 {
		for i := range b.Backends {
			numbers = append(numbers, i+1)
		}
	}
	var text strings.Builder
	suffix := ""
	if port != 0 {
		suffix = fmt.Sprintf(", port: %d", port)
	}
	for _, n := range numbers {
		backend := b.Backends[n-1]
		fmt.Fprintf(&text, "      - {address: %s%s}\n      - {address: %q%s}\n", backend.Addr4(), suffix, backend.Addr6(), suffix)
	}
	return text.String()
}
