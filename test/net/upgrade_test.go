package net

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/test/next"
)

// A shunt process with nextVariable is the next version, with another ABI. With killVariable it
// kills itself at that point of an upgrade.
const (
	nextVariable = "SHUNT_NET_NEXT"
	killVariable = "SHUNT_NET_KILL"
)

// becomeNext makes this process the next version, if nextVariable is set.
func becomeNext() {
	if os.Getenv(nextVariable) == "" {
		return
	}
	v := next.Version()
	v.At = func(p abi.Point) error {
		if os.Getenv(killVariable) == string(p) {
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		return nil
	}
	abi.Become(v)
}

// upgradeBed is a network under the load that an upgrade must not disturb: web and dns with NAT at
// the first VIPs, direct return over IPIP at the second, NAT with affinity at the third.
type upgradeBed struct {
	*bed
	clients  []netip.Addr
	places   map[netip.Addr]string // of clients with affinity
	sessions []*session
	stop     context.CancelFunc
	running  sync.WaitGroup
	load     *load
	mu       sync.Mutex
	failed   []error
	moved    int64 // octets
}

func (b *upgradeBed) services(backends ...int) string {
	third, second := directVIPs(2), directVIPs(1)
	return "timeouts: {settle: 1h}\n" + b.file(settings{attach: "native", limits: "flows: 100000", more: fmt.Sprintf(
		"  - name: direct\n    address: [%s, %q]\n    port: [80, 53]\n    protocol: [tcp, udp]\n    forwarding: dsr-ipip\n    backends:\n%s"+
			"  - name: sticky\n    address: [%s, %q]\n    port: 80\n    affinity: client-ip\n    backends:\n%s",
		second[0], second[1], b.backends(backends, 0), third[0], third[1], b.backends(backends, 8080))})
}

// newUpgradeBed starts this version, brings the slots of direct and sticky into transition, and
// makes flows that are remembered in it.
func newUpgradeBed(t *testing.T) *upgradeBed {
	t.Helper()
	b := &upgradeBed{bed: newDirectBed(t, lab.Options{Layout: lab.TwoArm, MTU: roomy, Backends: 3}, 2), places: map[netip.Addr]string{}}
	b.bed.decap(directVIPs(1), b.Backends...)
	b.clients = b.clientsOf(t, 4)
	b.write(b.services(1, 2))
	b.start()
	b.sessions = b.open(t, 8)
	for range 2 { // flows from before the change, and flows from after it
		for _, vip := range directVIPs(1) {
			b.sessions = append(b.sessions, b.sessionsOf(t, vip, 8)...)
		}
		for _, c := range b.clients {
			s, err := b.sessionFrom(c, vipOf(c, 2))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Close() })
			if before, ok := b.places[c]; ok && s.first.Backend != before {
				t.Fatalf("%s moved from %s to %s before anything was upgraded", c, before, s.first.Backend)
			}
			b.places[c] = s.first.Backend
			b.sessions = append(b.sessions, s)
		}
		b.reload(b.services(1, 2, 3))
	}
	b.unsettled(t)
	return b
}

// begin starts the load: the traffic of load, and transfers in both directions without a pause.
func (b *upgradeBed) begin(t *testing.T) {
	t.Helper()
	// So much at once, at the rate of pace: transfers without a limit fill the rings of the veths,
	// which then drop datagrams that no sender repeats.
	const piece = 64 << 10
	b.load = b.bed.begin(t, true)
	ctx, stop := context.WithCancel(context.Background())
	b.stop = stop
	t.Cleanup(func() { stop(); b.running.Wait() })
	for _, vip := range slices.Concat(vips, directVIPs(1)) {
		for _, transfer := range []func(int64) error{
			func(n int64) error {
				_, err := lab.Download(within(t, time.Minute), b.Client.HTTPClient(false), at(vip, 80), n)
				return err
			},
			func(n int64) error {
				_, err := lab.Upload(within(t, time.Minute), b.Client.HTTPClient(false), at(vip, 80), n)
				return err
			},
		} {
			b.running.Add(1)
			go func() {
				defer b.running.Done()
				pace := time.NewTicker(20 * time.Millisecond)
				defer pace.Stop()
				for ctx.Err() == nil {
					err := transfer(piece)
					b.mu.Lock()
					if b.moved += piece; err != nil {
						b.failed = append(b.failed, err)
					}
					b.mu.Unlock()
					<-pace.C
				}
			}()
		}
	}
}

// end stops the load. No part of it may have failed.
func (b *upgradeBed) end(t *testing.T) {
	t.Helper()
	b.stop()
	b.running.Wait()
	for _, err := range b.failed {
		t.Error(err)
	}
	b.load.end(t)
	t.Logf("%d MiB in transfers", b.moved>>20)
	b.same(t, "at the end")
}

// same requires that all sessions go on with their backends, and that clients reach theirs again.
func (b *upgradeBed) same(t *testing.T, when string) {
	t.Helper()
	b.goOn(t, when, b.sessions)
	for _, c := range b.clients {
		s, err := b.sessionFrom(c, vipOf(c, 2))
		if err != nil {
			t.Errorf("%s: a new connection of %s: %v", when, c, err)
			continue
		}
		s.Close()
		if s.first.Backend != b.places[c] {
			t.Errorf("%s: %s, which has affinity, moved from %s to %s", when, c, b.places[c], s.first.Backend)
		}
	}
}

// launchInVain starts this version, which is older, and waits for its end.
func (b *upgradeBed) launchInVain(t *testing.T) *process {
	t.Helper()
	p := b.launch()
	select {
	case <-p.ended:
	case <-time.After(patience * 20 * time.Second):
		_ = p.end(syscall.SIGKILL)
		t.Fatal("the older version started")
	}
	return p
}

// refused requires that this version, which is older, leaves the next one's data plane alone.
func (b *upgradeBed) refused(t *testing.T) {
	t.Helper()
	p := b.launchInVain(t)
	code := p.command.ProcessState.ExitCode()
	if says := "it has ABI 2, and this version of shunt has 1, which is older"; code != 1 || !strings.Contains(p.log(), says) || !strings.Contains(p.log(), "shunt detach") {
		t.Errorf("the older version ended with exit code %d, want 1 and the words %q, and the way out:\n%s", code, says, p.log())
	}
	if code, out := b.shunt("status", "--instance", b.instance); code != 1 || !strings.Contains(out, "it has ABI 2, and this version of shunt knows ABI 1") {
		t.Errorf("shunt status of the older version: exit code %d, want 1 and both numbers:\n%s", code, out)
	}
}

// counted is the sum of the services' counters.
func (s status) counted() (sum uint64) {
	for _, service := range s.Services {
		sum += service.PacketsIn + service.FlowsCreated
	}
	return sum
}

// TestUpgrade: a version with another ABI takes over under load: no connection is lost or moved, no
// transfer harmed, counters go on. Afterwards the version before is refused.
func TestUpgrade(t *testing.T) {
	b := newUpgradeBed(t)
	b.begin(t)
	b.kill()
	before := b.status()
	b.env = []string{nextVariable + "=1"}
	b.start()
	if !strings.Contains(b.daemon.log(), "upgraded the data plane") {
		t.Errorf("the log says nothing of an upgrade:\n%s", b.daemon.log())
	}
	after := b.status()
	if after.counted() < before.counted() || before.counted() == 0 {
		t.Errorf("services had counted %d, and %d after the upgrade", before.counted(), after.counted())
	}
	b.same(t, "after the upgrade")
	t.Logf("%d packets of flows that were still to be carried", after.Reasons["carrying"].Packets)
	b.kill()
	b.env = nil
	b.refused(t)
	b.env = []string{nextVariable + "=1"}
	b.start()
	b.end(t)
	b.reload(b.services(1, 2))
	b.kill()
	b.env = nil // the older version can remove maps that it does not know
}

// TestUpgradeKilled: a process that is killed during an upgrade disturbs no connection. The older
// version goes on if the upgrade had not taken effect, and the newer one finishes it if it had.
func TestUpgradeKilled(t *testing.T) {
	b := newUpgradeBed(t)
	b.begin(t)
	for _, p := range []abi.Point{abi.PointCopied, abi.PointGate, abi.PointCarried} {
		if b.daemon != nil {
			b.kill()
		}
		b.env = []string{nextVariable + "=1", killVariable + "=" + string(p)}
		if err := b.killsItself(); err != nil {
			t.Fatalf("%s: %v", p, err)
		}
		b.env = nil
		if p == abi.PointCopied {
			b.start()
		}
	}
	b.refusedMidway(t)
	b.env = []string{nextVariable + "=1"}
	b.start()
	b.end(t)
}

// refusedMidway requires that this version is refused while the upgrade is not finished.
func (b *upgradeBed) refusedMidway(t *testing.T) {
	t.Helper()
	p := b.launchInVain(t)
	if says := "an upgrade of instance"; !strings.Contains(p.log(), says) || !strings.Contains(p.log(), "start the version with ABI 2, which finishes it") {
		t.Errorf("the older version said:\n%s\nwant %q and what to do", p.log(), says)
	}
}

// killsItself starts shunt and waits until it has killed itself.
func (b *upgradeBed) killsItself() error {
	p := b.launch()
	select {
	case <-p.ended:
	case <-time.After(patience * 30 * time.Second):
		_ = p.end(syscall.SIGKILL)
		return errors.New("it did not end")
	}
	state, ok := p.command.ProcessState.Sys().(syscall.WaitStatus)
	if !ok || !state.Signaled() || state.Signal() != syscall.SIGKILL {
		return fmt.Errorf("it ended with %s:\n%s", p.command.ProcessState, p.log())
	}
	return nil
}
