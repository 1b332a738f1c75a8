// Gen makes the objects of the next version that tests of upgrades play: those of bpf/, with
// the changes that a next version might make to struct flow. The sources it compiles are in
// test/next/bpf while it runs.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// change is a text that has to be in a file once.
type change struct{ file, from, to string }

// The index of a service gets 32 bits, which makes the entry longer, moves what is behind it,
// and has no room any more in the seal's last word.
var changes = []change{
	{"lib/types.h", "SHUNT_ABI = 1,", "SHUNT_ABI = 2,"},
	{"lib/types.h", "\t__u16 service_index;\n\t__u8 service_generation;\n\t__u8 direction; /* enum direction */\n};",
		"\t__u32 service_index;\n\t__u8 service_generation;\n\t__u8 direction; /* enum direction */\n\t__u8 pad[6];\n};"},
	{"lib/flow.h", "(__u64)f->backend << 32 | (__u32)f->service_index << 16 |\n\t\t      (__u32)f->service_generation << 8 | f->direction;",
		"(__u64)f->backend << 32 | f->service_index;\n\t__u64 kind = (__u32)f->service_generation << 8 | f->direction;"},
	{"lib/flow.h", "names * MIX_10;", "names * MIX_10 + kind * MIX_0;"},
}

func main() {
	if err := generate("../../bpf", "bpf"); err != nil {
		fmt.Fprintln(os.Stderr, "make the next version's objects:", err)
		os.Exit(1)
	}
}

func generate(from, to string) (err error) {
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		return fmt.Errorf("copy %s: %w; remove %s if an earlier run has left it", from, err, to)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(to)) }()
	for _, c := range changes {
		path := filepath.Join(to, c.file)
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if n := strings.Count(string(text), c.from); n != 1 {
			return fmt.Errorf("%s has %d times, not once:\n%s\nmake the next version's change anew", path, n, c.from)
		}
		if err := os.WriteFile(path, []byte(strings.Replace(string(text), c.from, c.to, 1)), 0o644); err != nil {
			return err
		}
	}
	for _, object := range []string{"abi", "xdp", "tc", "guard", "sweep", "drops", "gate"} {
		compile := exec.Command("go", "run", "github.com/cilium/ebpf/cmd/bpf2go", "-target", "bpfel", "-no-global-types",
			object, filepath.Join(to, object+".bpf.c"))
		compile.Stdout, compile.Stderr = os.Stdout, os.Stderr
		if err := compile.Run(); err != nil {
			return fmt.Errorf("compile %s: %w", object, err)
		}
	}
	return nil
}
