package ping

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/diag/ping/late"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
)

const (
	lateFor  = 10 * time.Millisecond
	lateFrom = 11 // the probes before it are not kept
	lateLast = 40
)

// keeper keeps probes at a place of one host.
type keeper struct {
	collection *ebpf.Collection
	program    string
	close      func() error
}

// keep loads a program that keeps the requests, or the answers, at the host.
func keep(t *testing.T, at *lab.Host, program string, requests bool) *keeper {
	t.Helper()
	spec, err := late.LoadLate()
	if err != nil {
		t.Fatal(err)
	}
	for name := range spec.Programs {
		if name != program {
			delete(spec.Programs, name)
		}
	}
	isRequest := uint32(0)
	if requests {
		isRequest = 1
	}
	for name, value := range map[string]any{"late_ns": uint64(lateFor), "late_from": uint64(lateFrom), "late_requests": isRequest, "only_netns": netns(t, at)} {
		if err := spec.Variables[name].Set(value); err != nil {
			t.Fatal(err)
		}
	}
	k := &keeper{program: program}
	if k.collection, err = ebpf.NewCollection(spec); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.collection.Close)
	return k
}

func (k *keeper) attach(tracepoint string) error {
	l, err := kernel.AttachRawTracepoint(k.collection.Programs[k.program], tracepoint)
	if err == nil {
		k.close = l.Close
	}
	return err
}

// kept is the time for which the probe was kept, in ns.
func (k *keeper) kept(sequence uint64) (ns int64, err error) {
	var value uint64
	err = k.collection.Maps[late.LateMapShLate].Lookup(uint32(sequence%64), &value)
	return int64(value), err
}

// TestADelayIsFoundInEachStage keeps probes at a known place for a known time: right behind a stamp, so that the time is
// the stage's that begins with it, or right before the first stamp. The first probes are not kept. By them the clocks
// are known so well that a delay on the wire is found in its direction.
func TestADelayIsFoundInEachStage(t *testing.T) {
	for _, test := range []struct {
		stage, host, program, tracepoint string
		requests, before                 bool
	}{
		{"client.send", clientHost, late.LateProgShLateQueue, "net_dev_queue", true, true},
		{"client.queue", clientHost, late.LateProgShLateQueue, "net_dev_queue", true, false},
		{"wire.out", clientHost, late.LateProgShLateDriver, "net_dev_start_xmit", true, false},
		{"server.receive", serverHost, late.LateProgShLateReceive, "netif_rx", true, false},
		{"server.answer", serverHost, late.LateProgShLateStack, "netif_receive_skb", true, false},
		{"server.queue", serverHost, late.LateProgShLateQueue, "net_dev_queue", false, false},
		{"wire.back", serverHost, late.LateProgShLateDriver, "net_dev_start_xmit", false, false},
		{"client.receive", clientHost, late.LateProgShLateReceive, "netif_rx", false, false},
		{"client.protocol", clientHost, late.LateProgShLateStack, "netif_receive_skb", false, false},
	} {
		t.Run(test.stage, func(t *testing.T) {
			h := build(t)
			k := keep(t, map[string]*lab.Host{clientHost: h.client, serverHost: h.server}[test.host], test.program, test.requests)
			if test.before {
				if err := k.attach(test.tracepoint); err != nil {
					t.Fatal(err)
				}
			}
			h.serve(t, nil)
			opened := func() error { return k.attach(test.tracepoint) }
			if test.before {
				opened = nil
			}
			probes, s := h.pingOpened(t, Options{Server: server4, Count: lateLast, Interval: 15 * time.Millisecond, Bytes: 556}, opened, nil)
			if err := k.close(); err != nil {
				t.Error(err)
			}
			check(t, probes)
			if s.Answered != lateLast {
				t.Fatalf("%+v", s)
			}
			findLate(t, k, probes, test.stage)
		})
	}
}

// findLate compares the stages of probes that were kept with the stages of the others.
func findLate(t *testing.T, k *keeper, probes []Probe, stage string) {
	t.Helper()
	usual, later := map[string][]int64{}, map[string][]int64{}
	var kept, wrong []int64
	for _, p := range probes {
		if !p.isComplete() {
			continue
		}
		into := usual
		if p.Sequence >= lateFrom {
			into = later
		}
		for _, one := range p.Stages {
			name := one.Name
			if strings.HasPrefix(name, "client.wakeup") || name == "client.user" {
				continue // a process that was woken late is not the kernel's, and has its own test
			}
			into[name] = append(into[name], one.Ns)
		}
	}
	for _, p := range probes {
		ns, err := k.kept(p.Sequence)
		switch {
		case err != nil:
			t.Fatal(err)
		case p.Sequence < lateFrom && ns != 0:
			t.Errorf("probe %d was kept for %d ns", p.Sequence, ns)
		case p.Sequence >= lateFrom && p.isComplete():
			kept = append(kept, ns)
			wrong = append(wrong, abs(p.of(stage)-ns-median(usual[stage])))
		}
	}
	if len(kept) < (lateLast-lateFrom)/2 || len(usual[stage]) == 0 || slices.Contains(kept, 0) {
		t.Fatalf("probes were kept for %v ns", kept)
	}
	t.Logf("%s: kept for %s µs in the median, off by %s", stage, us(median(kept)), us(median(wrong)))
	if limit := max(median(kept)/20, 100_000); median(wrong) > limit {
		t.Errorf("%s is off by %s µs, of %s; at most %s are allowed", stage, us(median(wrong)), us(median(kept)), us(limit))
	}
	for name, times := range later {
		if grown := median(times) - median(usual[name]); name != stage && grown > median(kept)/4 {
			t.Errorf("%s is blamed with %s µs, where %s has %s", name, us(grown), stage, us(median(kept)))
		}
	}
}
