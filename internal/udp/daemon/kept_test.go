package daemon_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/shunt-lb/shunt/internal/udp/daemon"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
)

// asking asks one question after the other.
type asking struct {
	answered atomic.Int64
	stop     chan struct{}
	ended    chan error
}

// asks asks port 5000 until ends is called: each question must be answered by the program before the next one is asked.
func (b *bed) asks() *asking {
	b.Helper()
	a := &asking{stop: make(chan struct{}), ended: make(chan error, 1)}
	conn := b.dial(5000)
	b.Cleanup(func() { _ = conn.Close() })
	go func() {
		buffer := make([]byte, 64)
		for {
			select {
			case <-a.stop:
				a.ended <- nil
				return
			default:
			}
			question := fmt.Sprintf("q%d", a.answered.Load())
			_ = conn.SetDeadline(time.Now().Add(nodetest.Patience))
			_, err := conn.Write([]byte(question))
			n := 0
			if err == nil {
				n, err = conn.Read(buffer)
			}
			if want := "x" + question[1:]; err != nil || string(buffer[:n]) != want {
				a.ended <- fmt.Errorf("question %q is answered with %q, %w", question, buffer[:n], err)
				return
			}
			a.answered.Add(1)
		}
	}()
	return a
}

// more waits until so many more questions were answered.
func (b *bed) more(a *asking, questions int64) {
	b.Helper()
	want := a.answered.Load() + questions
	for deadline := time.Now().Add(nodetest.Patience); a.answered.Load() < want; time.Sleep(time.Millisecond) {
		select {
		case err := <-a.ended:
			b.Fatal(err)
		default:
		}
		if time.Now().After(deadline) {
			b.Fatalf("%d questions were answered, and not %d", a.answered.Load(), want)
		}
	}
}

func (b *bed) instance() string { return filepath.Base(b.Folder) }

func (b *bed) pins() string {
	return filepath.Join(kernel.Directory(kernel.DefaultPinRoot, "_udp"), b.instance())
}

// unkept requires that nothing is pinned any more, and nothing written down.
func (b *bed) unkept(when string) {
	b.Helper()
	for _, path := range []string{b.pins(), "/run/shunt/" + b.instance() + ".udp-leases"} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			b.Errorf("%s: %s is there, %v", when, path, err)
		}
	}
}

// The daemon is killed, or ends and keeps, and is started again: not one datagram is lost or goes to the kernel's socket, the lease is
// the same one, and its counters go on. SIGTERM without keep ends it.
func TestLeaseOutlivesTheDaemon(t *testing.T) {
	b := newBed(t, all)
	udptest.NeedsBoundRings(t, b.net.Server)
	b.run()
	p := b.work("feed", 0)
	b.until("x")
	held := func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").Holder != nil }
	first := lease(b.Is("it is held", held), "feed")
	traffic := b.asks()
	for _, end := range []struct {
		name      string
		end       func() error
		variables []string // of the next one
	}{
		{"killed", func() error { nodetest.Kill(b.Process); return nil }, []string{keepVariable + "=1"}},
		{"ended with keep", func() error { return b.Process.End(syscall.SIGTERM, nodetest.Patience) }, nil},
	} {
		before := lease(b.Is("it is held", held), "feed")
		b.more(traffic, 100)
		if err := end.end(); err != nil {
			t.Fatalf("%s: %v", end.name, err)
		}
		b.more(traffic, 300)
		if left, err := daemon.LeftLeases(); err != nil || left[b.instance()] != b.pins() {
			t.Errorf("%s: left are %v, %v", end.name, left, err)
		}
		b.run(end.variables...)
		after := lease(b.Is("it is resumed", held), "feed")
		b.more(traffic, 100)
		if h := after.Holder; h.Pid != int32(p.Process.Pid) || h.Uid != nobody || !h.Since.AsTime().Equal(first.Holder.Since.AsTime()) ||
			after.Given != 1 || after.Resumed != 1 || len(after.Ended) > 0 || after.Total.Matched < before.Total.Matched+300 || after.Total.PassedNoSocket != 0 {
			t.Errorf("%s: the lease is %v, and was %v", end.name, after, before)
		}
		if text := nodetest.Condition(b.Is("it is held", held), "udp_kernel_socket", "feed"); text != "" {
			t.Errorf("%s: %s", end.name, text)
		}
	}
	close(traffic.stop)
	b.Must(<-traffic.ended)
	if n := strings.Count(p.Log(), "serving feed"); n != 1 || strings.Contains(p.Log(), "over") {
		t.Errorf("the program said %q", p.Log())
	}
	st := b.Is("all is counted", func(st *shuntv1.GetStatusResponse) bool {
		c := lease(st, "feed").Total
		return c.GetMatched() > 0 && c.Delivered == c.Matched
	})
	accounted(t, "taken over twice", lease(st, "feed").Total)
	if text := b.Scrape(); !strings.Contains(text, "shunt_udp_leases_resumed_total{lease=\"feed\"} 1\n") || !strings.Contains(text, "shunt_udp_lease_held{lease=\"feed\"} 1\n") {
		t.Errorf("the metrics are\n%s", text)
	}
	b.Must(b.Process.End(syscall.SIGTERM, nodetest.Patience))
	b.until("kernel")
	if !strings.Contains(p.Log(), "the offer was changed or removed") {
		t.Errorf("the program said %q", p.Log())
	}
	b.unkept("after SIGTERM")
}

// Leases that a killed daemon left are ended by `shunt detach`, by a file without udp, and by a file without their entry.
func TestLeftLeasesEnd(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(b *bed)
		says string // to the program; "": nobody is there to say anything
	}{
		"detach": {func(b *bed) {
			p := b.Spawn(b.Self(), detachVariable+"="+b.instance())
			<-p.Ended
			if err := p.Err(); err != nil || !strings.Contains(p.Log(), "ended UDP leases") {
				b.Errorf("shunt detach: %v: %s", err, p.Log())
			}
		}, ""},
		"no udp": {func(b *bed) {
			b.addVeth("late0", "late1")
			b.Write("interfaces: [{name: late0}]\nservices: [{name: web, address: 192.0.2.20, port: 80, announce: none, backends: [{address: 192.0.2.1}]}]")
			b.run()
		}, ""},
		"another entry": {func(b *bed) {
			b.write(strings.ReplaceAll(all, "feed", "other"))
			b.run()
		}, "the offer feed was removed while no broker ran"},
		"no entry": {func(b *bed) {
			b.write()
			b.run()
		}, "the offer feed was removed while no broker ran"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, all)
			b.run()
			p := b.work("feed", 0)
			b.until("x")
			nodetest.Kill(b.Process)
			b.until("x")
			c.end(b)
			b.until("kernel")
			b.unkept(name)
			for deadline := time.Now().Add(nodetest.Patience); !strings.Contains(p.Log(), c.says); time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("the program said %q", p.Log())
				}
			}
		})
	}
}

// The program ends while no daemon runs: the kernel's socket has the datagrams, and the next daemon the lease.
func TestProgramEndsWithoutTheDaemon(t *testing.T) {
	b := newBed(t, all)
	b.run()
	p := b.work("feed", 0)
	b.until("x")
	nodetest.Kill(b.Process)
	nodetest.Kill(p)
	b.until("kernel")
	b.run()
	l := lease(b.Is("its end is known", func(st *shuntv1.GetStatusResponse) bool { return lease(st, "feed").Ended["died"] == 1 }), "feed")
	if l.Given != 1 || l.Resumed != 0 || l.LastEnd != "died" || l.Holder != nil {
		t.Errorf("the lease is %v", l)
	}
	b.until("kernel")
	b.unkept("after its end")
	b.work("feed", 0)
	b.until("x")
}
