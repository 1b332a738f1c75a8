// Gen makes the objects of the next version for tests of upgrades: the objects of bpf/, with
// the changes that a next version might make to struct flow. The sources that it compiles are
// in test/next/bpf while it runs.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"

	"github.com/shunt-lb/shunt/test/variant"
)

// The index of a service gets 32 bits, which makes the entry longer, moves the fields behind
// it, and leaves no room in the seal's last word.
var changes = []variant.Change{
	{File: "lb/types.h", From: "SHUNT_ABI = 1,", To: "SHUNT_ABI = 2,"},
	{
		File: "lb/types.h",
		From: "\t__u16 service_index;\n\t__u8 service_generation;\n\t__u8 direction; /* enum direction */\n};",
		To:   "\t__u32 service_index;\n\t__u8 service_generation;\n\t__u8 direction; /* enum direction */\n\t__u8 pad[6];\n};",
	},
	{
		File: "lb/flow.h",
		From: "(__u64)f->backend << 32 | (__u32)f->service_index << 16 |\n\t\t      (__u32)f->service_generation << 8 | f->direction;",
		To:   "(__u64)f->backend << 32 | f->service_index;\n\t__u64 kind = (__u32)f->service_generation << 8 | f->direction;",
	},
	{File: "lb/flow.h", From: "names * MIX_10;", To: "names * MIX_10 + kind * MIX_0;"},
}

func main() {
	if err := generate("../../bpf", "bpf"); err != nil {
		fmt.Fprintln(os.Stderr, "make the next version's objects:", err)
		os.Exit(1)
	}
}

func generate(from, to string) (err error) {
	defer func() { err = errors.Join(err, os.RemoveAll(to)) }()
	if err := variant.Sources(from, to, changes...); err != nil {
		return fmt.Errorf("%w; remove %s if an earlier run has left it", err, to)
	}
	return compileAll(from, to, []string{"xdp", "tc", "abi", "stopgap", "sweep", "drops", "gate", "check", "vlan", "tunnelled"})
}

// compileAll compiles objects, as many at a time as there are CPUs. The first take longest.
func compileAll(from, to string, objects []string) error {
	turn := make(chan struct{}, runtime.NumCPU())
	errs := make([]error, len(objects))
	var all sync.WaitGroup
	for i, object := range objects {
		turn <- struct{}{}
		all.Go(func() {
			defer func() { <-turn }()
			compile := exec.Command(filepath.Join(from, "compile"), object, filepath.Join(to, "lb", object+".bpf.c"))
			if out, err := compile.CombinedOutput(); err != nil {
				errs[i] = fmt.Errorf("compile %s: %w\n%s", object, err, out)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}
