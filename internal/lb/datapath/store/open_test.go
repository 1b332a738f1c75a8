package store

import (
	"errors"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// TestOpenFlowsAreCountedAnew: each count begins at zero and is its caller's own, from any goroutine, and the program
// that the first count loaded makes all counts.
func TestOpenFlowsAreCountedAnew(t *testing.T) {
	opts := testOptions(t)
	w := mustOpen(t, opts)
	must(t, w.PutBackend(reconcile.BackendRecord{BackendRef: reconcile.BackendRef{Index: 1, Generation: 1},
		BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.1"), Port: 80}}))
	first, err := w.OpenFlows()
	must(t, err)
	program := w.open.program
	first.Backends[1], w.open.counts.Backends[1], w.open.counts.Services[0] = 5, 5, 5 // as a count before would leave it
	var together sync.WaitGroup
	for range 4 {
		together.Go(func() {
			next, err := w.OpenFlows()
			if err != nil || next.Backends[1] != 0 || next.Services[0] != 0 {
				t.Errorf("counted again: %d flows of the backend, %d of the service, %v", next.Backends[1], next.Services[0], err)
			}
		})
	}
	together.Wait()
	if w.open.program != program {
		t.Error("the program was loaded again")
	}
	if first.Backends[1] != 5 || len(first.Backends) != len(w.backends) || len(first.Services) != len(w.services) {
		t.Errorf("the first count is changed by a later one, or has other sizes: %d and %d", len(first.Backends), len(first.Services))
	}
	must(t, w.Close())
	if w.open.program != nil || w.open.mapped != nil {
		t.Error("closed, and the program that counts is still there")
	}
}

// TestOpenFlowsWithoutProgram: a program that cannot be loaded is an error, and leaves nothing behind.
func TestOpenFlowsWithoutProgram(t *testing.T) {
	opts := testOptions(t)
	version := *abi.Built()
	version.Objects = maps.Clone(version.Objects)
	opts.Version = &version
	w := mustOpen(t, opts)
	fault := errors.New("no object")
	version.Objects[abi.ObjectSweep] = func() (*ebpf.CollectionSpec, error) { return nil, fault }
	if _, err := w.OpenFlows(); !errors.Is(err, fault) || !strings.Contains(err.Error(), "load the program that counts open flows") {
		t.Errorf("without the object: %v", err)
	}
	version.Objects[abi.ObjectSweep] = abi.Built().Objects[abi.ObjectSweep]
	_, err := w.OpenFlows() // tried again
	must(t, err)
}
