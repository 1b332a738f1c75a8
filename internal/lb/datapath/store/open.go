package store

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
)

// OpenFlows is the number of flows in use: connections of NAT that have been answered and are not closed, and
// conversations over UDP. Direct return keeps no entry for each flow, so its flows are not counted.
type OpenFlows struct {
	Services []uint64 // by service index
	Backends []uint64 // by backend index
}

// openCounter counts open flows. Its zero value loads the program at the first count and keeps it: a daemon counts for every
// status, scrape and reload.
type openCounter struct {
	mutex   sync.Mutex // held during a count: the program adds to memory
	program *ebpf.Program
	counts  OpenFlows // the memory
	mapped  [][]byte  // memory of counts
}

// OpenFlows walks through the flow table and counts. Flows come and go meanwhile. It may be called at any time.
func (v *View) OpenFlows() (OpenFlows, error) {
	o := &v.open
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if o.program == nil {
		if err := o.load(v); err != nil {
			return OpenFlows{}, fmt.Errorf("load the program that counts open flows: %w", errors.Join(err, o.unload()))
		}
	}
	clear(o.counts.Services)
	clear(o.counts.Backends)
	if _, err := o.program.Run(&ebpf.RunOptions{}); err != nil {
		return OpenFlows{}, fmt.Errorf("run sh_count to count open flows: %w", err)
	}
	return OpenFlows{Services: slices.Clone(o.counts.Services), Backends: slices.Clone(o.counts.Backends)}, nil
}

// load loads the program, and maps its counts into this process. The caller calls unload after an error.
func (o *openCounter) load(v *View) error {
	maps := []struct {
		name   string
		count  int
		counts *[]uint64
	}{{"sh_svc_open", len(v.services), &o.counts.Services}, {"sh_be_open", len(v.backends), &o.counts.Backends}}
	load := func() (*ebpf.CollectionSpec, error) {
		spec, err := v.opts.Version.Only(abi.ObjectSweep, "sh_count")()
		if err == nil {
			for _, m := range maps {
				spec.Maps[m.name].MaxEntries = uint32(m.count)
				spec.Maps[m.name].Flags |= unix.BPF_F_MMAPABLE
			}
		}
		return spec, err
	}
	coll, err := v.Load(load, map[string]any{"jiffies_per_second": v.rate})
	if err != nil {
		return err
	}
	defer coll.Close()
	for _, m := range maps {
		memory, err := MapArray(coll.Maps[m.name], m.name, 0, uint32(m.count), unix.PROT_READ|unix.PROT_WRITE)
		if err != nil {
			return err
		}
		o.mapped, *m.counts = append(o.mapped, memory), abi.Array[uint64](memory)
	}
	o.program, err = kernel.TakeProgram(coll, "sh_count")
	return err
}

// unload closes everything.
func (o *openCounter) unload() error {
	var errs []error
	if o.program != nil {
		errs = append(errs, o.program.Close())
	}
	for _, memory := range o.mapped {
		errs = append(errs, unix.Munmap(memory))
	}
	o.program, o.counts, o.mapped = nil, OpenFlows{}, nil
	return errors.Join(errs...)
}
