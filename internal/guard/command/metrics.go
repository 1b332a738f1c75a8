package command

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/metrics"
)

// reloads counts reloads of the policy's file, by result.
type reloads struct {
	mutex sync.Mutex
	last  metrics.Reloads
}

func (r *reloads) note(applied bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.last.Refused = !applied
	if applied {
		r.last.Applied = time.Now()
	}
}

func (r *reloads) get() metrics.Reloads {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.last
}

// listenAddress reads an address and port of --metrics; empty: none.
func listenAddress(text string) (netip.AddrPort, error) {
	if text == "" {
		return netip.AddrPort{}, nil
	}
	at, err := netip.ParseAddrPort(text)
	if err != nil || at.Port() == 0 {
		return at, fmt.Errorf("--metrics %q: write an address and a port, for example 127.0.0.1:9471", text)
	}
	return at, nil
}

// openMetrics opens an address for scrapes; they are answered from begin on. close can be called without that.
func openMetrics(ctx context.Context, at netip.AddrPort, log *slog.Logger, sample func() (*metrics.Sample, error)) (begin, closeAll func(), err error) {
	server := metrics.NewServer(sample, log)
	server.Setting = "--metrics"
	change, err := server.Prepare(ctx, at)
	if err != nil {
		return nil, nil, err
	}
	return change.Commit, func() { change.Drop(); server.Close() }, nil
}

// guardSample is an answer to a scrape of the guard.
func guardSample(r *reloads, a *agent.Agent) (*metrics.Sample, error) {
	status, err := protect.Look(kernel.DefaultPinRoot)
	if err != nil {
		return nil, err
	}
	denial, err := connect.Look(kernel.DefaultPinRoot)
	if err != nil {
		return nil, err
	}
	figures := guardFigures(a.Status(), status)
	if denial != nil {
		figures.Connections = []metrics.Count{{Of: "denied", Count: denial.Denied}, {Of: "audited", Count: denial.Audited}}
	}
	return &metrics.Sample{Version: cli.Version(), GoVersion: runtime.Version(), Reloads: r.get(), Guard: figures}, nil
}

func guardFigures(s agent.Status, status *protect.Status) *metrics.Guard {
	g := &metrics.Guard{Lines: []metrics.GuardLines{{Class: "alert", Told: s.Alerts.Told, Lost: s.Alerts.Lost}, {Class: "note", Told: s.Notes.Told, Lost: s.Notes.Lost}}}
	for _, o := range s.Off {
		g.SwitchedOff = append(g.SwitchedOff, o.Name)
	}
	for _, f := range s.Features {
		one := metrics.GuardFeature{Name: f.Name, On: f.On, Failed: f.Failed(), Rules: uint64(f.Rules), Events: f.Events, Missed: f.Missed, Alert: f.Alerts}
		for _, stream := range slices.Sorted(maps.Keys(f.LostBy)) {
			one.Lost = append(one.Lost, metrics.Count{Of: stream, Count: f.LostBy[stream]})
		}
		if f.Name == agent.DecoysName { // the kernel has one queue of them
			one.Lost = []metrics.Count{{Of: "all", Count: f.Lost}}
		}
		g.Features = append(g.Features, one)
		for _, t := range f.Thinned {
			kept := 0.0
			if t.OneOf > 0 {
				kept = 1 / float64(t.OneOf)
			}
			g.Thinned = append(g.Thinned, metrics.GuardThinned{Type: t.Type, Kept: kept, LeftOut: t.LeftOut})
		}
		if o := f.Opens; o != nil {
			g.Opens = &metrics.GuardOpens{Waited: o.Waited, Denied: o.Denied, Audited: o.Audited, Late: o.Late, Unsure: o.Unsure, Unread: o.Unread, Took: o.Took, Files: uint64(o.Objects)}
		}
		if d := f.Decoys; d != nil {
			for _, c := range []struct {
				of string
				n  int
			}{{"stand", d.Stand}, {"changed", d.Changed}, {"gone", d.Gone}, {"unknown", d.Unknown}} {
				g.Decoys = append(g.Decoys, metrics.Count{Of: c.of, Count: uint64(c.n)})
			}
		}
	}
	if status != nil {
		g.Enforced, g.Denied, g.Audited, g.Unheard = status.Hooks > 0, status.Denied, status.Audited, status.Unheard
		g.Unexamined, g.NoRoom = status.Missed, status.Unrecord+status.Untrusted
	}
	if s.Budget != nil {
		g.MaxCPU, g.Throttled = s.Budget.MaxCPU/100, s.Budget.Throttled
	}
	return g
}
