package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
)

const (
	machines = 3
	// nginx listens on serverPort, and HAProxy, which cannot have the same one at the VIP, on proxyPort.
	serverPort = 80
	proxyPort  = 8080
	// packetMTU is that of the machines' segment, with room for 1500 bytes in an outer header.
	packetMTU = 1600
	patience  = 20 * time.Second
)

// arm is a way from the client to the servers. All have the same network, and the router spreads their flows in the
// same way.
type arm struct {
	name, what string
	target     netip.AddrPort
	// start starts the balancer of a machine.
	start func(t *trial, machine *lab.Host) error
	// balances says that a flow's server does not depend on the machine that its packets come to.
	balances bool
}

// arms are all candidates, in the order of the report.
var arms = []arm{
	{
		name: "ecmp", what: "no balancer: the router's ECMP alone, and each machine's nginx answers what comes to it",
		target: netip.AddrPortFrom(lab.VIP4, serverPort), start: (*trial).addVIP,
	},
	{
		name: "shunt", what: "shunt run on each machine, forwarding: dsr-ipip, with health checks",
		target: netip.AddrPortFrom(lab.VIP4, serverPort), start: (*trial).startShunt, balances: true,
	},
	{
		name: "haproxy", what: "HAProxy on each machine in TCP mode, round robin, with health checks",
		target: netip.AddrPortFrom(lab.VIP4, proxyPort), start: (*trial).startHAProxy, balances: true,
	},
}

// trial is one arm in place.
type trial struct {
	options
	*lab.Mesh
	folder   string
	children []*lab.Process // of the machines
	shunts   []*lab.Process // the shunts among them, which leave remains if they do not end by themselves
}

// newTrial builds the network, and starts servers and balancers.
func newTrial(ctx context.Context, o options, folder string, a arm) (t *trial, err error) {
	const id = "benchmesh" // one id, so that a run finds the remains of one that was killed
	if err := lab.Sweep(id); err != nil {
		return nil, err
	}
	mesh, err := lab.BuildMesh(ctx, id, machines, packetMTU)
	if err != nil {
		return nil, err
	}
	t = &trial{options: o, Mesh: mesh, folder: folder}
	if err := t.start(ctx, a); err != nil {
		return nil, errors.Join(err, t.close(context.WithoutCancel(ctx)))
	}
	return t, nil
}

func (t *trial) start(ctx context.Context, a arm) error {
	if err := t.setInterfaces(); err != nil {
		return err
	}
	for _, m := range t.Machines {
		if err := t.startServer(m); err != nil {
			return err
		}
		if err := a.start(t, m); err != nil {
			return err
		}
	}
	if err := t.SetHashPolicy(1); err != nil {
		return err
	}
	return t.await(ctx, a)
}

// setInterfaces gives all interfaces the same offload settings, and a queue, as package bed says.
func (t *trial) setInterfaces() error {
	for _, host := range t.Hosts() {
		for _, i := range host.Interfaces() {
			if err := errors.Join(
				host.SetOffload(i.Name, map[string]bool{"tx": t.offload, "tso": t.offload, "gro": true}),
				host.SetQueue(i.Name, "pfifo"),
			); err != nil {
				return err
			}
		}
	}
	return nil
}

// path is a file of a machine's.
func (t *trial) path(machine *lab.Host, name string) string {
	return filepath.Join(t.folder, machine.Name()+"-"+name)
}

// spawn writes a configuration, and starts a program with it.
func (t *trial) spawn(machine *lab.Host, config, text, program string, arguments ...string) (*lab.Process, error) {
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	command := machine.Command(context.Background(), program, arguments...)
	command.Env = append(os.Environ(), "SHUNT_SOCKET=", "STATE_DIRECTORY="+t.folder)
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the benchmark, which then ends it
	p, err := command.Spawn()
	if err == nil {
		t.children = append(t.children, p)
	}
	return p, err
}

// startServer starts nginx, which says its machine's name.
func (t *trial) startServer(machine *lab.Host) error {
	config := t.path(machine, "nginx.conf")
	server := bed.Nginx{Workers: 1, Listen: strconv.Itoa(serverPort), Answer: machine.Name(),
		PID: t.path(machine, "nginx.pid"), ErrorLog: t.path(machine, "nginx.log"), Folder: t.folder}
	_, err := t.spawn(machine, config, server.Config(), "nginx", "-c", config, "-e", server.ErrorLog)
	return err
}

// addVIP has the machine answer for the VIP. Nobody asks for it by ARP: the router's paths lead to machines.
func (t *trial) addVIP(machine *lab.Host) error {
	return machine.AddAddress("lo", netip.PrefixFrom(lab.VIP4, 32))
}

func (t *trial) instance(machine *lab.Host) string { return t.ID() + "-" + machine.Name() }

// startShunt runs the real program with a real file, as its users do (docs/guide/ecmp.md).
func (t *trial) startShunt(machine *lab.Host) error {
	config := t.path(machine, "shunt.yaml")
	p, err := t.spawn(machine, config, fmt.Sprintf(`interfaces: [{name: eth0, attach: native}]
decapsulation: {from: [10.0.0.0/24]}
services:
  - name: web
    address: %s
    port: %d
    forwarding: dsr-ipip
    announce: none
    health: {tcp: {}, interval: 2s, timeout: 1s, rise: 1, fall: 3}
    backends: [%s]
api: {socket: %s}
`, lab.VIP4, serverPort, strings.Join(t.eachMachine("{address: %s}"), ", "), t.path(machine, "shunt.sock")),
		t.shunt, "run", "--config", config, "--instance", t.instance(machine))
	if err == nil {
		t.shunts = append(t.shunts, p)
	}
	return err
}

// eachMachine is a text for each, with its address.
func (t *trial) eachMachine(format string) (all []string) {
	for _, m := range t.Machines {
		all = append(all, fmt.Sprintf(format, m.Addr4()))
	}
	return all
}

func (t *trial) startHAProxy(machine *lab.Host) error {
	if err := t.addVIP(machine); err != nil {
		return err
	}
	// connect() walks all ports that rest before it finds one, after many connections.
	if err := machine.SetSysctl("net.ipv4.tcp_tw_reuse", "1"); err != nil {
		return err
	}
	var servers strings.Builder
	for i, m := range t.Machines {
		fmt.Fprintf(&servers, "    server m%d %s:%d check\n", i+1, m.Addr4(), serverPort)
	}
	config := t.path(machine, "haproxy.cfg")
	_, err := t.spawn(machine, config, fmt.Sprintf(`global
    maxconn 4000
defaults
    mode tcp
    timeout connect 5s
    timeout client 60s
    timeout server 60s
listen web
    bind %s:%d
    balance roundrobin
%s`, lab.VIP4, proxyPort, servers.String()), "haproxy", "-db", "-f", config)
	return err
}

// close ends all processes, and removes the remains of a shunt that had to be killed.
func (t *trial) close(ctx context.Context) error {
	var errs []error
	for _, p := range t.children {
		if err := p.End(syscall.SIGTERM, patience); err != nil && !endedBySIGTERM(err) {
			errs = append(errs, fmt.Errorf("end %s: %w\n%s", p.Path, err, p.Log()))
		}
	}
	if len(t.shunts) > 0 {
		errs = append(errs, t.sweepShunts(ctx))
	}
	return errors.Join(append(errs, t.Close())...)
}

// endedBySIGTERM says that a process did not handle the signal, as HAProxy with -db, and ended all the same.
func endedBySIGTERM(err error) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	status, is := exit.Sys().(syscall.WaitStatus)
	return is && status.Signaled() && status.Signal() == syscall.SIGTERM
}

func (t *trial) sweepShunts(ctx context.Context) error {
	var errs []error
	for _, m := range t.Machines {
		if _, err := os.Stat(kernel.Directory(kernel.DefaultPinRoot, t.instance(m))); err == nil {
			if out, err := m.Command(ctx, t.shunt, "detach", "--instance", t.instance(m)).CombinedOutput(); err != nil {
				errs = append(errs, fmt.Errorf("shunt detach on %s: %w\n%s", m.Name(), err, out))
			}
		}
		locks, _ := filepath.Glob("/run/shunt/" + t.instance(m) + ".*") // the only error is of the pattern
		for _, path := range locks {
			errs = append(errs, os.Remove(path))
		}
	}
	return errors.Join(errs...)
}
