package kernel

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// Types are the types of the kernel and its modules (BTF) for every load of this process. Decoding them takes as long as the
// verification of a large program; decoded, they take 1.5 MB. A module that is loaded again has the same types, because it is from the
// same build.
var Types = btf.NewCache()

// Load loads an object's programs. constants are set if the object has them; maps replace the maps that the
// object would make.
func Load(spec *ebpf.CollectionSpec, constants map[string]any, maps map[string]*ebpf.Map) (*ebpf.Collection, error) {
	for name, value := range constants {
		variable, ok := spec.Variables[name]
		if !ok {
			continue
		}
		if err := variable.Set(value); err != nil {
			return nil, fmt.Errorf("set the constant %s to %v: %w", name, value, err)
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: maps, Cache: Types})
	if err != nil {
		return nil, shortened(err)
	}
	return coll, nil
}

// ParseOnce returns a loader of an object that a process loads often: the first call parses it, and every call
// returns a copy. It may be called at any time.
func ParseOnce(load func() (*ebpf.CollectionSpec, error)) func() (*ebpf.CollectionSpec, error) {
	once := sync.OnceValues(load)
	return func() (*ebpf.CollectionSpec, error) {
		spec, err := once()
		return spec.Copy(), err
	}
}

// TakeProgram takes a program out of a collection; the rest can be closed.
func TakeProgram(coll *ebpf.Collection, name string) (*ebpf.Program, error) {
	p := coll.DetachProgram(name)
	if p == nil {
		return nil, fmt.Errorf("the compiled object lacks %s; this is a fault in the build: run `make generate`", name)
	}
	return p, nil
}

// shortened cuts a verifier's log to its end, which has the complaint.
func shortened(err error) error {
	const lines = 12
	var v *ebpf.VerifierError
	if !errors.As(err, &v) || len(v.Log) == 0 {
		return err
	}
	log, omitted := v.Log, 0
	if len(log) > lines {
		omitted = len(log) - lines
		log = log[omitted:]
	}
	return fmt.Errorf("the kernel's verifier refused a program: %w\n\t(%d lines omitted)\n\t%s", v.Cause, omitted, strings.Join(log, "\n\t"))
}
