package daemon

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/health"
)

// broken is a data plane whose calls all fail, or none.
type broken struct {
	err    error
	counts map[string]kernel.Count
	calls  []string
}

func (b *broken) called(what string) error {
	b.calls = append(b.calls, what)
	return b.err
}
func (b *broken) Heartbeat() error { return b.called("heartbeat") }
func (b *broken) ReasonCounts() (map[string]kernel.Count, error) {
	return b.counts, b.called("reasons")
}
func (b *broken) Sweep() (store.SweepResult, error) {
	return store.SweepResult{}, b.called("sweep")
}
func (b *broken) CountOpen() (store.OpenByName, error) {
	return store.OpenByName{}, b.called("open")
}
func (b *broken) Recall() (store.RecallResult, error) {
	return store.RecallResult{}, b.called("recall")
}

// TestPulse: each task is done even if others fail, and failures are reported.
func TestPulse(t *testing.T) {
	var log bytes.Buffer
	conditions := &condition.Set{}
	b := &broken{counts: map[string]kernel.Count{"flows_full": {Packets: 1}}}
	p := newPulse(b, "default", conditions, slog.New(slog.NewTextHandler(&log, nil)))
	now := time.Now()
	beat := func() {
		now = now.Add(heartbeatInterval)
		p.beat(map[string]uint64{"eth0": 1}, health.Trouble{Probes: 1, Late: 1}, now)
	}
	beat()
	p.sweep(false)
	if p.open.Load() != nil {
		t.Error("open flows are counted though nobody wants to know")
	}
	p.sweep(true)
	if p.flows.Load() == nil || p.remembered.Load() == nil || p.open.Load() == nil {
		t.Error("what was counted is not kept")
	}
	if log.Len() > 0 {
		t.Errorf("nothing is wrong, and the log says %s", log.String())
	}
	b.counts["flows_full"] = kernel.Count{Packets: 2}
	beat()
	b.err = errors.New("the map is on fire")
	b.counts["ports_exhausted"] = kernel.Count{Packets: 1}
	beat()
	p.sweep(true)
	if lines := strings.Count(log.String(), "the map is on fire"); lines != 5 {
		t.Errorf("five things failed, and the log says %s", log.String())
	}
	if got, want := strings.Join(b.calls, " "), "heartbeat reasons sweep recall sweep recall open heartbeat reasons heartbeat reasons sweep recall open"; got != want {
		t.Errorf("calls %s, want %s", got, want)
	}
	var codes []string
	for _, c := range conditions.List() {
		codes = append(codes, c.Code)
	}
	if got, want := strings.Join(codes, " "), condition.FlowsFull+" "+condition.ChecksLate; got != want {
		t.Errorf("conditions %s, want %s: what was counted while it could not be read is told later", got, want)
	}
	b.err = nil
	beat()
	if list := conditions.List(); len(list) != 3 {
		t.Errorf("conditions %v: a shortage was counted before the counters could be read again", list)
	}
}
