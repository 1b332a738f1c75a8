// Package datapath is the way into the kernel: it loads the programs, attaches them, pins
// maps and links so that they outlive the process, and turns the project's values into
// what the programs read. Nothing else of shunt imports a BPF library.
//
//	/sys/fs/bpf/shunt/<instance>/
//	    abi-1/sh_services …     the maps, taken over by the next process of the same ABI
//	    link-<interface>        the program on an interface, replaced in one step
//	    tc-in-<interface>       those with attach: tc
//	    tc-out-<interface>
//	    clsact-<interface>      a note that the qdisc is ours (Linux before 6.6)
//	    deliver-in-<interface>  those at tc beside one at XDP (deliver.go)
//	    deliver-out-<interface>
//	    chain-<interface>       what runs there before and after it
//	    link-drops-<program>    the programs that count frames the kernel refused
//
// A VLAN with attach: native has no pin: sh_vlans says that the program of its parent hands its frames on.
//
// A killed process leaves all of this in place and working. Open adopts it; Remove, which
// needs no process to be alive, takes it away.
//
// Needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, and CAP_SYS_ADMIN to mount bpffs.
package datapath

import (
	"errors"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// Datapath is a loaded data plane that this process writes to.
type Datapath = Plane

// Open loads the data plane of an instance, or takes over the one that is there, which is
// upgraded if it has another ABI. Where that fails, it goes on as it was; what was made is gone.
func Open(opts store.Options) (*Datapath, error) {
	if err := opts.Complete(); err != nil {
		return nil, err
	}
	if err := kernel.Mount(opts.PinRoot, opts.Log); err != nil {
		return nil, err
	}
	have, err := finishUpgrade(opts)
	if err != nil {
		return nil, err
	}
	if have != 0 && have != opts.Version.ABI {
		return openUpgraded(opts, have)
	}
	w, err := store.Open(opts)
	if err != nil {
		return nil, err
	}
	d, err := New(w)
	if err != nil {
		return nil, errors.Join(err, w.Abandon())
	}
	return d, nil
}

// OpenReadOnly opens an instance's data plane to look at. ErrNotLoaded when there is none.
func OpenReadOnly(opts store.Options) (*store.View, error) {
	if err := opts.Complete(); err != nil {
		return nil, err
	}
	if err := requireOwn(opts); err != nil {
		return nil, err
	}
	return store.OpenView(opts)
}
