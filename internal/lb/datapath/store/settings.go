package store

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

// ErrGone says that a position has another tenant, or none.
var ErrGone = errors.New("the backend is no longer at its position")

// Hop is the next hop towards a backend: the interface's index and the hardware address. The zero Hop means
// "not known".
type Hop struct {
	Interface int
	MAC       net.HardwareAddr
}

// SetHop writes the next hop towards a backend. It returns ErrGone if the position has another tenant.
func (w *Writer) SetHop(r reconcile.BackendRef, hop Hop) error {
	w.backendMu.Lock()
	defer w.backendMu.Unlock()
	b, err := w.backend(r)
	if err != nil {
		return fmt.Errorf("write the next hop: %w", err)
	}
	if hop.Interface == 0 || len(hop.MAC) == 0 {
		w.noteHostBackend(r.Index, false)
		atomic.StoreUint64(&b.Hop, 0)
		return nil
	}
	if len(hop.MAC) != 6 {
		return fmt.Errorf("write the next hop of backend %s: %s is not an Ethernet address of 6 octets", abi.FromAddr(b.Address), hop.MAC)
	}
	index, ok := w.IndexOf(hop.Interface)
	if !ok {
		w.noteHostBackend(r.Index, false)
		atomic.StoreUint64(&b.Hop, 0)
		return fmt.Errorf("write the next hop of backend %s: it is behind interface %s, which shunt is not attached to: list that interface under `interfaces`",
			abi.FromAddr(b.Address), kernel.InterfaceName(hop.Interface))
	}
	word := abi.ToHop(hop.MAC, index)
	host := w.isHost(word)
	if host {
		if err := w.require(abi.FEATURE_HOST); err != nil {
			return fmt.Errorf("write the next hop of backend %s, which is this host: %w", abi.FromAddr(b.Address), err)
		}
	}
	w.noteHostBackend(r.Index, host)
	atomic.StoreUint64(&b.Hop, word)
	return nil
}

// backend returns the tenant of a position. The caller holds backendMu.
func (w *Writer) backend(r reconcile.BackendRef) (*abi.Backend, error) {
	if r.Index == 0 || int(r.Index) >= len(w.backends) {
		return nil, fmt.Errorf("backend index %d of %d: %w", r.Index, len(w.backends)-1, ErrGone)
	}
	b := &w.backends[r.Index]
	if b.Generation != r.Generation || b.Live == 0 {
		return nil, fmt.Errorf("backend index %d, generation %d: %w", r.Index, r.Generation, ErrGone)
	}
	return b, nil
}

// Owned says whether an address may be answered for.
type Owned bool

// The values of Owned.
const (
	OwnedNever   Owned = false
	OwnedForever Owned = true
)

// SetOwned lets the programs answer ARP and neighbour solicitations for an address, or
// forbids it. An address without a record, or one that is not to be announced, stays
// unanswered.
func (w *Writer) SetOwned(address netip.Addr, owned Owned) error {
	return w.changeAddress(address, func(a *abi.Address, there bool) bool {
		a.OwnedUntil = 0
		if owned && a.Flags&uint32(abi.ADDRESS_ANNOUNCE) != 0 {
			a.OwnedUntil = abi.OwnedForever
		}
		return there
	})
}

// Timeouts that are not configured.
const (
	// RFC 5382 REQ-5 allows a half-closed connection to end after 4 min.
	halfClosed = 4 * time.Minute
	// A closed port is not reused for a while: 60 s is Linux's TIME-WAIT (TCP_TIMEWAIT_LEN), which the backend
	// keeps if it closed first. Otherwise the client keeps it, and 2 s let the last segments pass.
	restBackendFirst = 60 * time.Second
	rest             = 2 * time.Second
)

var timeoutNames = [abi.TIMEOUT_COUNT]string{
	abi.TIMEOUT_TCP_ESTABLISHED:        "tcp_established",
	abi.TIMEOUT_TCP_HANDSHAKE:          "tcp_handshake",
	abi.TIMEOUT_TCP_HALF_CLOSED:        "tcp_half_closed",
	abi.TIMEOUT_TCP_RESET:              "tcp_closing",
	abi.TIMEOUT_TCP_REST_BACKEND_FIRST: "tcp_rest_backend_first",
	abi.TIMEOUT_TCP_REST:               "tcp_rest",
	abi.TIMEOUT_UDP:                    "udp",
}

// SetSettings writes timeouts and the pool of source ports.
func (w *Writer) SetSettings(t model.Timeouts, ports value.PortRange) error {
	if ports.First == 0 || ports.Last < ports.First {
		return fmt.Errorf("set the source ports of NAT to %s: the range must begin at 1 or later and not end before it begins", ports)
	}
	var durations [abi.TIMEOUT_COUNT]time.Duration
	durations[abi.TIMEOUT_TCP_ESTABLISHED] = t.TCPEstablished
	durations[abi.TIMEOUT_TCP_HANDSHAKE] = t.TCPHandshake
	durations[abi.TIMEOUT_TCP_HALF_CLOSED] = min(cmp.Or(t.TCPHalfClosed, halfClosed), t.TCPEstablished)
	durations[abi.TIMEOUT_TCP_RESET] = t.TCPClosing
	durations[abi.TIMEOUT_TCP_REST_BACKEND_FIRST] = restBackendFirst
	durations[abi.TIMEOUT_TCP_REST] = rest
	durations[abi.TIMEOUT_UDP] = t.UDP
	for i, timeout := range durations {
		if timeout <= 0 || timeout > time.Duration(1<<31-1)/time.Duration(w.rate)*time.Second {
			return fmt.Errorf("set the timeout %s to %s: it must be more than 0 and at most %s", timeoutNames[i], timeout,
				time.Duration(1<<31-1)/time.Duration(w.rate)*time.Second)
		}
	}
	s := &w.settings[0]
	for i, timeout := range durations {
		jiffies := (timeout*time.Duration(w.rate) + time.Second - 1) / time.Second
		atomic.StoreUint32(&s.Timeouts[i], uint32(jiffies))
	}
	abi.StorePorts(s, ports.First, ports.Last-ports.First+1)
	return nil
}

// SetEncapsulation writes the contents of outer headers.
func (w *Writer) SetEncapsulation(e model.Encapsulation) {
	s := &w.settings[0]
	for _, family := range []struct {
		prefix netip.Prefix
		source *abi.Addr
		vary   *uint64
	}{
		{e.Sources4, &s.TunnelSource4, &s.TunnelVary4},
		{e.Sources6, &s.TunnelSource6, &s.TunnelVary6},
	} {
		var source abi.Addr
		var vary uint64
		if family.prefix.IsValid() {
			source, vary = abi.ToAddr(family.prefix.Masked().Addr()), abi.ToVary(family.prefix)
		}
		if *family.source == source && atomic.LoadUint64(family.vary) == vary {
			continue // a reload must not touch the packets of others, not even for a moment
		}
		// The source does not vary while it changes: no packet leaves with an address between the two.
		atomic.StoreUint64(family.vary, 0)
		abi.StoreAddr(family.source, source)
		atomic.StoreUint64(family.vary, vary)
	}
	s.GuePort = kernel.ToWire(e.GUEPort)
}

// rememberBudget is the number of flows that may be newly remembered in a tick, of about a second. At half of
// it, the share of first packets, a flood of them fills a quarter of the table before its first entries,
// unfinished handshakes, are over.
func rememberBudget(entries uint32) uint32 { return max(64, entries/20) }

// RecallResult is the result of one walk through the remembered flows.
type RecallResult struct {
	Entries uint64 `json:"entries"` // seen
	Expired uint64 `json:"expired"` // removed, because idle for too long
	Agreed  uint64 `json:"agreed"`  // removed, because their slot says the same
	Marked  uint64 `json:"marked"`  // kept, because their slot says otherwise
}

// Recall walks through the remembered flows and removes the flows that are over.
func (w *Writer) Recall() (RecallResult, error) { return w.runRecall(false) }

// runRecall runs sh_recall, which deletes nothing if it is only to read.
func (w *Writer) runRecall(look bool) (RecallResult, error) {
	var out abi.Recall
	in := abi.Recall{Look: uint64(abi.Bool(look))}
	if _, err := w.recall.Run(&ebpf.RunOptions{Context: in, ContextOut: &out}); err != nil {
		return RecallResult{}, fmt.Errorf("run sh_recall to go through the remembered flows: %w", err)
	}
	return RecallResult{Entries: out.Entries, Expired: out.Expired, Agreed: out.Agreed, Marked: out.Marked}, nil
}

// Heartbeat tells the programs that the daemon runs and keeps next hops fresh. The programs consider the daemon
// gone if they have not heard it for 10 s (HEARTBEAT_SECONDS_MAX).
func (w *Writer) Heartbeat() error {
	_, err := w.readClock(true)
	return err
}

// SweepResult is the result of one walk through the flow table.
type SweepResult struct {
	Entries     uint64 `json:"entries"`     // two for each flow
	Flows       uint64 `json:"flows"`       // alive
	Established uint64 `json:"established"` // of them, flows in use: not closed flows whose ports rest
	Expired     uint64 `json:"expired"`     // entries removed
}

// Sweep walks through the flow table, counts living flows and removes the flows that are over.
func (w *Writer) Sweep() (SweepResult, error) {
	var out abi.Sweep
	if _, err := w.sweep.Run(&ebpf.RunOptions{Context: abi.Sweep{}, ContextOut: &out}); err != nil {
		return SweepResult{}, fmt.Errorf("run sh_sweep to remove flows that are over: %w", err)
	}
	return SweepResult{Entries: out.Entries, Flows: out.Flows, Established: out.Established, Expired: out.Expired}, nil
}
