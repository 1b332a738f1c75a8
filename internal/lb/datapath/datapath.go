// Package datapath is the access to the kernel, in rooms. The arrows between them point down:
//
//	datapath    opens a data plane: made, taken over, or upgraded
//	upgrade     copies the contents of maps of one layout to maps of another, while packets arrive
//	attach      programs on interfaces, and their chains
//	store       maps: opened, read, written
//	abi         layout, byte order, compiled objects
//
//	/sys/fs/bpf/shunt/<instance>/abi-1/sh_services …     the maps, taken over by the next process of the same ABI
//
// A killed process leaves all of this in place and working. Open adopts it; attach.Remove, which needs no running
// process, removes it.
//
// Needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, and CAP_SYS_ADMIN to mount bpffs.
package datapath

import (
	"errors"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/datapath/upgrade"
)

// Datapath is a loaded data plane that this process writes to.
type Datapath = attach.Plane

// Open loads the data plane of an instance, or takes over the existing one, which is upgraded if it has another
// ABI. If Open fails, the existing data plane continues unchanged, and new objects are removed.
func Open(opts store.Options) (*Datapath, error) {
	if err := opts.Complete(); err != nil {
		return nil, err
	}
	if err := kernel.Mount(opts.PinRoot, opts.Log); err != nil {
		return nil, err
	}
	have, err := upgrade.Finish(opts)
	if err != nil {
		return nil, err
	}
	if have != 0 && have != opts.Version.ABI {
		return upgrade.Run(opts, have)
	}
	w, err := store.Open(opts)
	if err != nil {
		return nil, err
	}
	d, err := attach.New(w)
	if err != nil {
		return nil, errors.Join(err, w.Abandon())
	}
	return d, nil
}

// OpenReadOnly opens an instance's data plane for reading. It returns ErrNotLoaded if there is none.
func OpenReadOnly(opts store.Options) (*store.View, error) {
	if err := opts.Complete(); err != nil {
		return nil, err
	}
	if err := upgrade.RequireOwn(opts); err != nil {
		return nil, err
	}
	return store.OpenView(opts)
}
