package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lab"
)

// everything lists all flows, for a fault that takes the network itself away.
var everything = []Permission{{Service: translated.name}, {Service: direct.name}}

// hasCondition waits until the daemon has a condition with a text in it; if the text is empty,
// until it has none with that code.
func (b *bed) hasCondition(code, text string) {
	b.t.Helper()
	what := fmt.Sprintf("condition %s with %q", code, text)
	if text == "" {
		what = "end of condition " + code
	}
	eventually(b.t, what, func() error {
		found, err := b.conditions()
		if err != nil {
			return err
		}
		if (text == "") != (found[code] == "") || !strings.Contains(found[code], text) {
			return fmt.Errorf("conditions: %v", found)
		}
		return nil
	})
}

// TestInterfaceLostAndReturned: a listed interface that is removed is a condition. Nothing
// else suffers, and when it is back, shunt is attached to it again.
func TestInterfaceLostAndReturned(t *testing.T) {
	p := begin(t, setup{how: "shunt", quiet: 2 * time.Second})
	spare, err := p.AddHost("spare")
	p.must(err)
	p.must(p.Connect(lab.End{Host: p.Balancer, Interface: "eth2", IPv4: netip.MustParsePrefix("10.8.0.1/24")},
		lab.End{Host: spare, Interface: "eth0", IPv4: netip.MustParsePrefix("10.8.0.2/24")}, lab.Cable{MTU: roomy}))
	p.apply(p.load, "eth2 added", p.config, p.config)

	t.Run("one that carries nothing", func(t *testing.T) { p.loseInterface(t, "eth2", nil) })
	t.Run("the one to the backends", func(t *testing.T) { p.loseInterface(t, "eth1", everything) })
	t.Run("the one to the clients", func(t *testing.T) { p.loseInterface(t, "eth0", everything) })
	report(t, p.end("egress_unlisted"))
}

// loseInterface removes an interface, waits until the daemon has noticed, and brings it back:
// the flows in may break until the load is answered again, and not afterwards.
func (p *proof) loseInterface(t *testing.T, iface string, may []Permission) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	before, err := p.Balancer.InterfaceIndex(iface)
	p.must(err)
	var idle []*lab.Session // send nothing while it is away, so that only shunt could lose them
	for i := range 2 * len(p.load.options.Targets) {
		s, err := p.Client.OpenSession(ctx, "tcp", netip.AddrPort{}, p.load.target(i).TCP.String())
		p.must(err)
		defer s.Close()
		_, err = s.Ask(ctx, "/before")
		p.must(err)
		idle = append(idle, s)
	}
	end := p.load.Event("loss of "+iface, may...)
	p.must(p.Balancer.DeleteInterface(iface))
	p.hasCondition("interface_missing", iface)
	if may == nil { // the load goes on meanwhile, and the file can be changed
		after := p.config.clone()
		after.members[translated.name][1] = member{weight: 2}
		p.apply(p.load, "a weight, while an interface is away", p.config, after)
		p.config = after
		p.answered(t)
	}
	p.must(p.Relay(ctx, p.Balancer, iface), p.Client.SetMTU("eth0", 1500))
	p.hasCondition("interface_missing", "")
	now, err := p.Balancer.InterfaceIndex(iface)
	p.must(err)
	if now == before {
		t.Fatalf("interface %s has the index %d that it had: it was not made anew", iface, now)
	}
	link, err := p.Balancer.Netlink().LinkByName(iface)
	p.must(err)
	if xdp := link.Attrs().Xdp; xdp == nil || !xdp.Attached {
		t.Errorf("the condition has ended, but no program is on %s", iface)
	}
	p.answered(t)
	for _, s := range idle {
		if _, err := s.Ask(ctx, "/after"); err != nil {
			t.Errorf("a connection that was idle while %s was away: %v", iface, err)
		}
	}
	end()
	p.answered(t)
}

// answered waits until every target has answered, over a new connection and over UDP.
func (p *proof) answered(t *testing.T) {
	t.Helper()
	for _, to := range p.load.options.Targets {
		for network, address := range map[string]netip.AddrPort{"tcp": to.TCP, "udp": to.UDP} {
			eventually(t, fmt.Sprintf("an answer of %s over %s from %s", to.Service, network, address), func() error {
				ctx, cancel := context.WithTimeout(context.Background(), stallMax)
				defer cancel()
				s, err := p.Client.OpenSession(ctx, network, netip.AddrPort{}, address.String())
				if err != nil {
					return err
				}
				defer s.Close()
				_, err = s.Ask(ctx, "/answered")
				return err
			})
		}
	}
}

// TestExhaustedMaps: limits that are too small for a file refuse it by name before anything is
// changed, and the configuration in force stays.
func TestExhaustedMaps(t *testing.T) {
	p := begin(t, setup{how: watchedHow, quiet: 2 * time.Second})
	seen := 0
	p.writes(t, &seen)
	for name, c := range map[string]struct{ more, says string }{
		"services": {many(120, "  - {name: many%[1]d, address: 192.0.2.%[2]d, port: %[3]d, backends: [{address: 10.0.0.2}]}\n"), "limits.services"},
		"backends": {"  - name: many\n    address: 192.0.2.88\n    port: 80\n    backends:\n" + many(1100, "      - {address: 10.0.%[4]d.%[2]d, port: %[3]d}\n"), "limits.backends"},
	} {
		end := p.load.Event("a file with too many " + name)
		wrong := p.config.clone()
		wrong.settings = c.more
		p.write(wrong)
		result, err := p.reload()
		p.must(err)
		if why := fmt.Sprint(result.Refused, result.Faults); result.Applied || !strings.Contains(why, c.says) {
			t.Errorf("too many %s: applied %v, want a refusal that names %s: %s", name, result.Applied, c.says, why)
		}
		p.hasCondition("config_refused", p.path)
		if writes := p.writes(t, &seen); len(writes) > 0 {
			t.Errorf("too many %s: %d writes before the refusal, the first: %+v", name, len(writes), writes[0])
		}
		p.answered(t)
		end()
	}
	p.apply(p.load, "the file before", p.config, p.config)
	p.hasCondition("config_refused", "")
	report(t, p.end())
}

// TestKernelRefusesEntries: a map without room in the kernel is a condition. Existing entries
// stay; missing ones are tried again, and written once there is room.
func TestKernelRefusesEntries(t *testing.T) {
	p := begin(t, setup{how: fullHow, quiet: 2 * time.Second})
	full := p.path + ".full"
	p.must(os.WriteFile(full, nil, 0o600))
	more := p.config.clone()
	more.extra = []int{1}
	end := p.load.Event("a map without room")
	p.write(more)
	result, err := p.reload()
	p.must(err)
	if result.Applied || !strings.Contains(result.Refused, "no room here") || !strings.Contains(result.Refused, "tried again") {
		t.Errorf("a reload that a map has no room for: applied %v, %q", result.Applied, result.Refused)
	}
	p.hasCondition("reconcile_failing", "no room here")
	p.answered(t)
	p.must(os.Remove(full))
	p.hasCondition("reconcile_failing", "")
	eventually(t, "an answer of the service that had no room", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), stallMax)
		defer cancel()
		_, err := lab.Get(ctx, p.Client.HTTPClient(false), "192.0.2.77:80")
		return err
	})
	end()
	report(t, p.end())
}

// many are numbered lines: the number, an octet from 100 on, a port and a third octet.
func many(count int, format string) string {
	var text strings.Builder
	for i := range count {
		fmt.Fprintf(&text, format, i, 100+i%100, 1000+i/100, 1+i/200)
	}
	return text.String()
}

// TestExhaustedFlows: a full table of flows is a condition that names the limit. Its flows go
// on, and so do new ones, which only may not be idle for long.
func TestExhaustedFlows(t *testing.T) {
	const limit = 1000 // the least allowed
	p := begin(t, setup{how: "shunt", quiet: 2 * time.Second, limits: fmt.Sprintf("flows: %d", limit)})
	end := p.load.Event("a full table of flows")
	for i := range limit + limit/2 {
		to := p.load.options.Targets[i%2] // the translated services, of both families
		conn, err := p.Client.Dial(context.Background(), "tcp", to.TCP.String())
		p.must(err)
		defer conn.Close()
	}
	p.hasCondition("flows_full", p.instance)
	p.answered(t)
	end()
	report(t, p.end("flows_full"))
}

// TestExhaustedPorts: a backend without free source ports is a condition. A flow with a port
// keeps it.
func TestExhaustedPorts(t *testing.T) {
	p := begin(t, setup{how: "shunt", quiet: 2 * time.Second})
	few := p.config.clone()
	few.settings = "snat: {ports: \"50000-50007\"}\n"
	end := p.load.Event("8 source ports", Permission{Service: translated.name, New: true})
	p.apply(p.load, "8 source ports", p.config, few)
	p.hasCondition("ports_short", p.instance)
	p.apply(p.load, "all ports again", few, p.config)
	p.answered(t)
	end()
	report(t, p.end("ports_exhausted"))
}

// memoryGroup is a control group that bounds memory, of the machine's cgroup version.
type memoryGroup struct{ path, procs, limit, usage, unlimited string }

func newMemoryGroup(t *testing.T) memoryGroup {
	t.Helper()
	name := fmt.Sprintf("shunt-load-%d", os.Getpid())
	for _, g := range []memoryGroup{
		{"/sys/fs/cgroup/memory/" + name, "cgroup.procs", "memory.limit_in_bytes", "memory.usage_in_bytes", "-1"},
		{"/sys/fs/cgroup/" + name, "cgroup.procs", "memory.max", "memory.current", "max"},
	} {
		if os.Mkdir(g.path, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			eventually(t, "end of "+g.path, func() error { return os.Remove(g.path) })
		})
		if _, err := os.Stat(filepath.Join(g.path, g.limit)); err == nil {
			return g
		}
	}
	t.Fatal("no control group that bounds memory can be made: mount the memory controller")
	return memoryGroup{}
}

func (g memoryGroup) set(file, value string) error {
	return os.WriteFile(filepath.Join(g.path, file), []byte(value), 0o644)
}

// squeeze sets the limit to the memory in use.
func (g memoryGroup) squeeze() error {
	usage, err := os.ReadFile(filepath.Join(g.path, g.usage))
	if err != nil {
		return err
	}
	return g.set(g.limit, strings.TrimSpace(string(usage)))
}

// TestMemoryPressure: the kernel kills a daemon that gets no more memory sooner or later, and
// the next one too. New flows may find no memory for their entries, because the kernel charges
// these to the daemon too. Existing flows go on, and the next daemon with memory takes over.
func TestMemoryPressure(t *testing.T) {
	group := newMemoryGroup(t)
	p := begin(t, setup{how: "shunt", quiet: 2 * time.Second, args: []string{"--on-exit", "keep"},
		before: []string{"sh", "-c", `echo $$ > "$0" && exec "$@"`, filepath.Join(group.path, group.procs)}})
	end := p.load.Event("no more memory", Permission{Service: translated.name, New: true})
	p.must(group.squeeze())
	gone := func() bool {
		select {
		case <-p.daemon.Ended:
			return true
		default:
			return false
		}
	}
	reloads := 0
	for ; reloads < 1000 && !gone(); reloads++ {
		p.write(p.edited(reloads))
		_, _ = p.reload()
	}
	if !gone() {
		t.Fatalf("after %d reloads the daemon still has memory: the limit does not bind, and the test proves nothing", reloads)
	}
	before := p.identity()
	p.must(group.squeeze())
	p.launch()
	eventually(t, "the end of a daemon that has no memory", func() error {
		if !gone() {
			return errors.New("it runs")
		}
		return nil
	})
	counters, err := p.view.ReasonCounts()
	p.must(err)
	t.Logf("killed after %d reloads; %d flows found no memory", reloads, counters["table_full"].Packets)
	p.must(group.set(group.limit, group.unlimited))
	p.answered(t)
	p.write(p.config)
	p.start()
	if difference := p.difference(before, p.identity()); difference != "" {
		t.Errorf("the next daemon did not adopt what was there (-before +now):\n%s", difference)
	}
	p.answered(t)
	end()
	report(t, p.end("table_full"))
}

// edited is the configuration with a comment that grows: no change, but more to read.
func (p *proof) edited(n int) config {
	c := p.config.clone()
	c.settings = "# " + strings.Repeat("more ", 1000*n) + "\n"
	return c
}

// TestClockStep: a daemon whose clock differs from its predecessor's, as after a machine was
// suspended or moved, still adopts everything: no state that outlives a process is kept in a
// clock's time. Programs measure time by the kernel's jiffies, which cannot be set.
func TestClockStep(t *testing.T) {
	p := begin(t, setup{how: "shunt", quiet: 2 * time.Second, args: []string{"--on-exit", "keep"}})
	for _, ahead := range []int{1_000_000, 0, 500_000} { // seconds, forwards and back
		p.before = []string{"unshare", "--time", "--monotonic", strconv.Itoa(ahead), "--boottime", strconv.Itoa(ahead)}
		p.suffer(outage{fmt.Sprintf("a clock %d s ahead", ahead), syscall.SIGKILL, false})
		p.apply(p.load, "nothing", p.config, p.config)
		status, err := control.NewClient(p.socket).Status(context.Background())
		p.must(err)
		if found := status.GetDaemon().GetConditions(); len(found) > 0 {
			t.Errorf("with a clock %d s ahead: %+v", ahead, found)
		}
	}
	counters, err := p.view.ReasonCounts()
	p.must(err)
	if n := counters["fib_fallback"].Packets; n > 0 {
		t.Errorf("%d packets took the daemon for dead", n)
	}
	report(t, p.end())
}
