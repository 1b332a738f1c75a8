package kernel

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// Grace waits for running programs. It is an array of maps, made for its side effect: bpf(2) does not return from
// changing one before synchronize_rcu() does, so that user space knows that every
// running program sees the new map (maybe_wait_bpf_programs in kernel/bpf/syscall.c,
// since commit 1ae80cf31938, 4.20). An XDP run is one RCU read-side section. It is the
// only documented way for user space to have a grace period of RCU.
type Grace struct{ outer, inner *ebpf.Map }

// NewGrace makes the maps.
func NewGrace() (*Grace, error) {
	spec := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	inner, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("make a map to wait for running programs with: %w", err)
	}
	outer, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: spec})
	if err != nil {
		_ = inner.Close()
		return nil, fmt.Errorf("make a map of maps to wait for running programs with: %w", err)
	}
	return &Grace{outer, inner}, nil
}

// Wait returns when every program run that began before the call has ended.
func (g *Grace) Wait() error {
	if err := g.outer.Put(uint32(0), g.inner); err != nil {
		return fmt.Errorf("wait until running programs have ended: %w", err)
	}
	return nil
}

// Close closes the maps.
func (g *Grace) Close() error { return errors.Join(g.outer.Close(), g.inner.Close()) }
