package daemon

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// draining is a data plane whose flows end as time passes.
type draining struct {
	begin   time.Time
	ends    time.Duration // no flow is open after this time
	packets time.Duration // until this time each look finds a new packet of direct return
	direct  bool
	broken  error
	count   uint64
}

func (d *draining) Sweep() (store.SweepResult, error) {
	if time.Since(d.begin) < d.ends {
		return store.SweepResult{Established: 3}, d.broken
	}
	return store.SweepResult{}, d.broken
}

func (d *draining) Contents() (reconcile.Contents, error) {
	record := reconcile.ServiceRecord{Name: "web"}
	if record.Forwarding = model.ForwardingNAT; d.direct {
		record.Forwarding = model.ForwardingDSRL2
	}
	return reconcile.Contents{Services: map[uint32]reconcile.ServiceRecord{4: record}}, nil
}

func (d *draining) Counters() (store.Counters, error) {
	if time.Since(d.begin) < d.packets {
		d.count++
	}
	return store.Counters{Services: map[uint32]store.Traffic{4: {PacketsIn: d.count}}}, nil
}

// TestDrainEnds: a drain lasts until the last flow of NAT has ended, and until direct return has been silent for long enough. If
// it cannot count flows it waits until its timeout.
func TestDrainEnds(t *testing.T) {
	const timeout = 10 * time.Minute
	for _, c := range []struct {
		name        string
		flows       draining
		interrupt   bool
		least, most time.Duration
		says        string
	}{
		{"nothing is open", draining{}, false, 0, 0, "drained: all flows have ended"},
		{"flows end", draining{ends: time.Minute}, false, time.Minute, time.Minute + heartbeatInterval, "open_flows=3"},
		{"direct return is silent", draining{direct: true, packets: time.Minute}, false, time.Minute + drainSilence - heartbeatInterval, time.Minute + drainSilence + heartbeatInterval, "drained"},
		{"packets of NAT do not count", draining{packets: time.Hour}, false, 0, 0, "drained"},
		{"flows stay", draining{ends: time.Hour}, false, timeout, timeout, "the timeout is over"},
		{"interrupted", draining{ends: time.Hour}, true, timeout, timeout, "the drain ends before the flows: interrupted"},
		{"flows cannot be counted", draining{broken: errors.New("not to be read")}, false, timeout, timeout, "cannot count the flows that are still open"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c.flows.begin = time.Now()
				var said strings.Builder
				interrupted, interrupt := context.WithCancel(t.Context())
				defer interrupt()
				if c.interrupt {
					interrupt()
				}
				limited, cancel := context.WithTimeout(t.Context(), timeout)
				defer cancel()
				drainage{flows: &c.flows, log: slog.New(slog.NewTextHandler(&said, nil)), interrupted: interrupted}.await(limited)
				if took := time.Since(c.flows.begin); took < c.least || took > c.most {
					t.Errorf("the drain took %v, want %v to %v", took, c.least, c.most)
				}
				if !strings.Contains(said.String(), c.says) {
					t.Errorf("the log does not say %q:\n%s", c.says, &said)
				}
			})
		})
	}
}

// TestClosedToNew: no backend takes new flows, and the services in force stay as they are.
func TestClosedToNew(t *testing.T) {
	web := &model.Service{Name: "web", Backends: []model.Backend{{Weight: 3}, {Weight: 1}}}
	got := closedToNew([]*model.Service{web})
	if len(got) != 1 || got[0].Name != "web" || len(got[0].Backends) != 2 {
		t.Fatalf("the closed services are %+v", got)
	}
	for _, b := range got[0].Backends {
		if b.Share() != 0 {
			t.Errorf("a backend still takes new flows: %+v", b)
		}
	}
	if got[0].Backends[0].Weight != 3 {
		t.Errorf("a source's declaration has changed: %+v", got[0].Backends[0])
	}
	if web.Backends[0].Share() != 300 || web.Backends[0].Weight != 3 || web.Backends[1].Weight != 1 {
		t.Errorf("the service in force has changed: %+v", web)
	}
}

// TestLastWord: the last log line names the command that ends a data plane that stays.
func TestLastWord(t *testing.T) {
	said := unattended("web", 1, time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local))
	for _, part := range []string{"still forwarding 1 service ", "since 2026-01-02 03:04:05", "shunt detach", "web"} {
		if !strings.Contains(said, part) {
			t.Errorf("%q does not say %q", said, part)
		}
	}
}
