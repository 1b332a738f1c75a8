package store

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// natSourceRuns manages the runs in sh_sources. One or several backends name a run; it is written before it is
// named, never changed while it is named, and its elements are reused only after a grace period.
type natSourceRuns struct {
	named map[uint64]int    // run -> backends that name it
	runs  map[string]uint64 // content -> run, of the named runs
	freed []uint64          // no longer named, but a running program may have read the name
}

// adopt takes over the runs that the backends name.
func (s *natSourceRuns) adopt(v *View) {
	s.named, s.runs = map[uint64]int{}, map[string]uint64{}
	for i := range v.backends {
		run := v.backends[i].Sources
		first, count := abi.FromRun(run)
		if count == 0 || uint64(first)+uint64(count) > uint64(len(v.runs)) {
			continue
		}
		s.named[run]++
		var addresses []netip.Addr
		for _, a := range v.runs[first : first+count] {
			addresses = append(addresses, abi.FromAddr(a))
		}
		s.runs[contentOf(addresses)] = run
	}
}

func contentOf(addresses []netip.Addr) string {
	var b strings.Builder
	for _, a := range addresses {
		b.WriteString(a.String())
		b.WriteByte(' ')
	}
	return b.String()
}

// release removes one reference to a run.
func (s *natSourceRuns) release(run uint64) {
	if s.named[run]--; s.named[run] > 0 {
		return
	}
	delete(s.named, run)
	for content, r := range s.runs {
		if r == run {
			delete(s.runs, content)
		}
	}
	s.freed = append(s.freed, run)
}

// find finds count free elements in a row, or reports that there are none.
func (s *natSourceRuns) find(count, total uint32) (first uint32, ok bool) {
	taken := append([]uint64(nil), s.freed...)
	for run := range s.named {
		taken = append(taken, run)
	}
	slices.Sort(taken) // by first element
	for _, run := range taken {
		at, n := abi.FromRun(run)
		if at >= first+count {
			break
		}
		first = max(first, at+n)
	}
	return first, first+count <= total
}

// SetNATSources sets the addresses that full NAT to a backend sends from; with none it cannot send. It returns
// ErrGone if the position has another tenant.
func (w *Writer) SetNATSources(r reconcile.BackendRef, addresses []netip.Addr) error {
	w.backendMu.Lock()
	defer w.backendMu.Unlock()
	b, err := w.backend(r)
	if err != nil {
		return fmt.Errorf("write the source addresses: %w", err)
	}
	before := atomic.LoadUint64(&b.Sources)
	if len(addresses) == 0 {
		w.forgetNATSources(r.Index)
		return nil
	}
	content := contentOf(addresses)
	run, ok := w.sources.runs[content]
	if ok && run == before {
		return nil
	}
	if !ok {
		if run, err = w.writeNATSources(addresses); err != nil {
			return fmt.Errorf("write the source addresses of backend %s: %w", abi.FromAddr(b.Address), err)
		}
		w.sources.runs[content] = run
	}
	w.sources.named[run]++
	atomic.StoreUint64(&b.Sources, run)
	if before != 0 {
		w.sources.release(before)
	}
	return nil
}

// writeNATSources writes a new run.
func (w *Writer) writeNATSources(addresses []netip.Addr) (uint64, error) {
	count, total := uint32(len(addresses)), uint32(len(w.runs))
	first, ok := w.sources.find(count, total)
	if !ok && len(w.sources.freed) > 0 {
		if err := w.Grace(); err != nil {
			return 0, err
		}
		w.sources.freed = nil
		first, ok = w.sources.find(count, total)
	}
	if !ok {
		return 0, fmt.Errorf("the table has room for %d source addresses, and is full: list fewer under snat.addresses", total)
	}
	for i, a := range addresses {
		abi.StoreAddr(&w.runs[first+uint32(i)], abi.ToAddr(a))
	}
	return abi.ToRun(first, count), nil
}

// forgetNATSources removes a backend's reference to its sources. The caller holds backendMu.
func (w *Writer) forgetNATSources(index uint32) {
	b := &w.backends[index]
	if run := atomic.SwapUint64(&b.Sources, 0); run != 0 {
		w.sources.release(run)
	}
}
