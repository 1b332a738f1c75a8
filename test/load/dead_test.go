package load

import (
	"flag"
	"fmt"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
)

var deadFlag = flag.Duration("dead", 0, "how long a killed daemon stays away; 0: ten minutes with SHUNT_SOAK, otherwise a few seconds")

func deadTime() time.Duration {
	switch {
	case *deadFlag != 0:
		return *deadFlag
	case soak:
		return 10 * time.Minute
	}
	return 5 * time.Second
}

const (
	// deadFlows is the least that a table of flows may have. More flows are opened in seven seconds.
	deadFlows = 1000
	// deadPorts is more than three times the ports that new connections have in use, or resting for
	// two seconds, towards one backend: a search always finds a port that is free, or whose flow is
	// over.
	deadPorts = 128
	// deadTuples is the number of backends with so many ports: each family has its own.
	deadTuples = 2 * backendCount
)

// deadAmount is mostly new connections, so that they take the places and ports.
var deadAmount = Amount{
	KeepAlive: 4, KeepAliveEvery: 400 * time.Millisecond, NewPerSecond: 300,
	Transfers: 4, TransferSize: 4 << 20, TransferRate: 2 << 20, UDPPerSecond: 4,
}

// TestDaemonStaysDead kills the daemon and does not start it again; no client notices. New connections
// go on, through NAT and direct return, for longer than the table of flows and the source ports last.
// So packets alone end the flows that are over, and reuse their places. Direct return has slots in
// transition all that time, because no daemon settles them. The next daemon adopts it all.
func TestDaemonStaysDead(t *testing.T) {
	p := begin(t, setup{how: "shunt", quiet: 2 * time.Second, args: []string{"--on-exit", "keep"}, amount: deadAmount,
		limits: fmt.Sprintf("flows: %d", deadFlows), settings: fmt.Sprintf("snat: {ports: \"40000-%d\"}\n", 40000+deadPorts-1)})
	p.config.settle = "15m"
	p.config.members[direct.name][1+p.random.IntN(backendCount)] = member{weight: 2 + p.random.IntN(3)}
	p.apply(p.load, "another weight, which nobody settles", p.config, p.config)
	time.Sleep(p.upTo(500 * time.Millisecond)) // a random moment

	end := p.load.Event("no daemon")
	p.bed.end(syscall.SIGKILL)
	before, opened, answers := p.identity(), p.opened(), p.load.Report().Done[New]
	time.Sleep(deadTime())                                         // no wait for a condition: it is the measurement
	need := uint64(max(deadFlows, deadPorts*deadTuples) * 11 / 10) // less than a tenth is UDP
	eventually(t, "more flows than places and ports", func() error {
		if n := p.opened() - opened; n <= need {
			return fmt.Errorf("%d of %d", n, need)
		}
		return nil
	})
	opened, answers = p.opened()-opened, p.load.Report().Done[New]-answers
	reasons, err := p.view.ReasonCounts()
	p.must(err)
	t.Logf("without a daemon: %d new connections were answered; NAT opened %d flows with %d places and %d ports of TCP", answers, opened, deadFlows, deadPorts*deadTuples)
	t.Logf("entries that are there: %d of flows, %d of remembered ones; %d packets took the way of the kernel's routing table, %d ports of closed flows were taken, %d unfinished handshakes ended",
		p.entries("sh_flows"), p.entries("sh_remembered"), reasons["fib_fallback"].Packets, reasons["port_taken"].Packets, reasons["handshake_evicted"].Packets)
	if n := reasons["port_taken"].Packets; n > 0 {
		t.Errorf("%d flows took the port of a flow that was not over, while flows that were over kept their ports", n)
	}
	if p.entries("sh_remembered") == 0 {
		t.Error("no flow of direct return was remembered: no slot was in transition, and the test proves less than it says")
	}

	p.start()
	if difference := p.difference(before, p.identity()); difference != "" {
		t.Errorf("the next start did not adopt what was there (-before +now):\n%s", difference)
	}
	p.answered(t)
	end()
	report(t, p.end())
}

// opened is the number of flows that NAT has opened.
func (p *proof) opened() (count uint64) {
	p.t.Helper()
	contents, err := p.view.Contents()
	p.must(err)
	counters, err := p.view.Counters()
	p.must(err)
	for i, r := range contents.Services {
		if r.Name == translated.name { // one service for each family
			count += counters.Services[i].FlowsCreated
		}
	}
	return count
}

// entries is the number of entries in a map.
func (p *proof) entries(name string) (count int) {
	p.t.Helper()
	paths, err := filepath.Glob(filepath.Join(kernel.DefaultPinRoot, "shunt", p.instance, "abi-*", name))
	p.must(err)
	if len(paths) != 1 {
		p.t.Fatalf("map %s is pinned at %v, want one place", name, paths)
	}
	m, err := ebpf.LoadPinnedMap(paths[0], &ebpf.LoadPinOptions{ReadOnly: true})
	p.must(err)
	defer m.Close()
	key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
	all := m.Iterate()
	for all.Next(&key, &value) {
		count++
	}
	p.must(all.Err())
	return count
}
