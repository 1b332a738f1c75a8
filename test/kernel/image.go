package main

import (
	"bufio"
	"bytes"
	"context"
	"debug/elf"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/machine"
	"github.com/shunt-lb/shunt/test/kernel/suite"
)

// compiled has one package's tests: the guest's command, and the path of the binary here.
type compiled struct {
	suite.Test
	asked string // the entry of --packages
	host  string // path of the binary here
	name  string // path of the package in the repository: "test/net"
}

// wantedModules are loaded in every guest, with their dependencies, unless they are built in: the tests make
// interfaces of these kinds and use these hooks.
var wantedModules = []string{
	"tcp_diag", "udp_diag", // to close sockets
	"veth", "bridge", "8021q", "bonding", "dummy", "macvlan", "tun", // interfaces
	"ipip", "sit", "ip6_tunnel", "fou", "fou6", // the kernel's own tunnels; GUE is part of fou
	"sch_ingress", "cls_bpf", "act_bpf", // clsact, where there is no tcx
	"nf_tables", "nft_chain_nat", "nft_masq", "nft_ct", // a second opinion on NAT
	"nft_nat", "nft_limit", "nft_log", "nft_numgen", "nf_conntrack_netlink", "iptable_filter", "iptable_nat", // rules around pods
	"ip_vs", "ip_vs_rr", // the translation of kube-proxy in mode ipvs
	"sch_netem", "sch_tbf",
	"ext4", // a file system whose inodes the kernel evicts from memory
	"loop", "overlay",
	"tls", "gcm", "ctr", "ghash_generic", // TLS of sockets, and its cipher
	"nfnetlink", "xfrm_user", // netlink families that a real machine loads on demand
}

// compile builds the tests of every package with tests.
func compile(ctx context.Context, root, work string, o options) (tests []compiled, err error) {
	for i, asked := range o.packages {
		pkg, only, filtered := strings.Cut(asked, "=")
		if !filtered {
			only = o.run
		}
		list := exec.CommandContext(ctx, "go", "list", "-f", "{{.ImportPath}}\t{{.Dir}}\t{{len .TestGoFiles}}{{len .XTestGoFiles}}", pkg)
		list.Dir, list.Stderr = root, os.Stderr
		out, err := list.Output()
		if err != nil {
			return nil, fmt.Errorf("go list %s: %w; --packages takes packages of this module, comma separated", pkg, err)
		}
		for j, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
			field := strings.Split(line, "\t")
			if len(field) != 3 || field[2] == "00" {
				fmt.Println("no tests in", pkg)
				continue
			}
			rel, err := filepath.Rel(root, field[1])
			if err != nil {
				return nil, err
			}
			t := compiled{asked: asked, name: filepath.ToSlash(rel), host: filepath.Join(work, fmt.Sprintf("%d-%d.test", i, j))}
			t.Test = suite.Test{
				Package: field[0],
				Binary:  fmt.Sprintf("/tests/%d-%d.test", i, j),
				Dir:     path.Join("/src", t.name),
				Timeout: o.timeout,
				// Less, so that stacks of hanging tests are printed before they are stopped.
				Args: []string{"-test.timeout=" + (o.timeout - o.timeout/20).String()},
			}
			if only != "" {
				t.Args = append(t.Args, "-test.run="+only)
			}
			t.Args = append(t.Args, o.args...)
			if err := goTool(ctx, root, "test", "-c", "-ldflags=-s -w", "-o", t.host, field[0]); err != nil {
				return nil, err
			}
			tests = append(tests, t)
		}
	}
	if len(tests) == 0 {
		return nil, fmt.Errorf("none of %s has tests", strings.Join(o.packages, ", "))
	}
	return tests, nil
}

// goTool runs the go command to make a static binary.
func goTool(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// writeImage packs init, tests, the repository's files and modules; fault is the module of ./fault, "": none.
func writeImage(file, root, init, fault string, tests []compiled, k kernel, o options) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	buffered := bufio.NewWriterSize(f, 1<<20)
	a := machine.NewArchive(buffered)
	if err := a.AddFile("/init", init, 0o755); err != nil {
		return err
	}
	if err := addBusybox(a); err != nil {
		return err
	}
	var list []suite.Test
	for _, t := range tests {
		if err := a.AddFile(t.Binary, t.host, 0o755); err != nil {
			return err
		}
		t.Args = append(slices.Clone(t.Args), "-test.short") // emulation is slow
		list = append(list, t.Test)
	}
	if err := addTree(a, root); err != nil {
		return fmt.Errorf("pack the repository's files: %w", err)
	}
	modules := wantedModules
	if needRules(tests) {
		if err := addRules(a); err != nil {
			return err
		}
		modules = append(slices.Clone(modules), ruleModules...)
	}
	if err := addModules(a, k, modules); err != nil {
		return err
	}
	if fault != "" {
		if err := a.AddFile("/modules/999-fault.ko", fault, 0o644); err != nil {
			return err
		}
	}
	if err := addFiles(a, o); err != nil {
		return err
	}
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	if err := a.Add("/tests.json", text, 0o644); err != nil {
		return err
	}
	if err := a.Close(); err != nil {
		return err
	}
	if err := buffered.Flush(); err != nil {
		return err
	}
	return f.Close()
}

// addFiles packs the files that the command line names.
func addFiles(a *machine.Archive, o options) error {
	if o.debian != "" {
		if err := a.AddFile("/root.tar", o.debian, 0o644); err != nil {
			return err
		}
	}
	if o.files == "" {
		return nil
	}
	entries, err := os.ReadDir(o.files)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := a.AddFile(path.Join("/packages", e.Name()), filepath.Join(o.files, e.Name()), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// addBusybox packs busybox; the guest installs its names.
func addBusybox(a *machine.Archive) error {
	file, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	f, err := elf.Open(file)
	if err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("%s needs shared libraries, which the guest lacks; as root: apt-get install busybox-static", file)
		}
	}
	return a.AddFile("/bin/busybox", file, 0o755)
}

// treeFileMax is the size in bytes above which a file of the repository is taken for a build product.
const treeFileMax = 4 << 20

// addTree packs the repository's files under /src: tests read golden files and test data
// by paths relative to their package.
func addTree(a *machine.Archive, root string) error {
	return filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name != root && strings.HasPrefix(d.Name(), ".") { // .git, .tools
				return filepath.SkipDir
			}
			return nil
		}
		info, err := d.Info()
		if err != nil || !d.Type().IsRegular() || info.Size() > treeFileMax {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		return a.AddFile(path.Join("/src", filepath.ToSlash(rel)), name, 0o644)
	})
}

// addModules packs the wanted modules and their dependencies as /modules/NN-name.ko, numbered in the order in
// which they must be loaded.
func addModules(a *machine.Archive, k kernel, wanted []string) error {
	files := map[string]string{} // module name to path
	err := filepath.WalkDir(filepath.Join(k.modules, "kernel"), func(name string, d fs.DirEntry, err error) error {
		if base, _, is := strings.Cut(filepath.Base(name), ".ko"); err == nil && is {
			files[moduleName(base)] = name
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("list modules: %w", err)
	}
	builtin, err := os.ReadFile(filepath.Join(k.modules, "modules.builtin"))
	if err != nil {
		return fmt.Errorf("list the built-in modules: %w", err)
	}
	if missing := absent(wanted, files, string(builtin)); len(missing) > 0 {
		return fmt.Errorf("the kernel has no module %s, built in or not; wantedModules lists the modules that tests need", strings.Join(missing, ", "))
	}
	content := map[string][]byte{}
	order, err := loadOrder(wanted, func(name string) (depends []string, known bool, err error) {
		file, known := files[name]
		if !known {
			return nil, false, nil
		}
		if content[name], err = readModule(file); err != nil {
			return nil, true, err
		}
		depends, err = moduleDepends(content[name])
		return depends, true, err
	})
	if err != nil {
		return err
	}
	for i, name := range order {
		if err := a.Add(fmt.Sprintf("/modules/%03d-%s.ko", i, name), content[name], 0o644); err != nil {
			return err
		}
	}
	return nil
}

// absent are the wanted modules that are neither files nor built in; builtin is
// modules.builtin, one path a line.
func absent(wanted []string, files map[string]string, builtin string) (missing []string) {
	in := map[string]bool{}
	for _, line := range strings.Fields(builtin) {
		in[moduleName(strings.TrimSuffix(path.Base(line), ".ko"))] = true
	}
	for _, name := range wanted {
		if name = moduleName(name); files[name] == "" && !in[name] {
			missing = append(missing, name)
		}
	}
	return missing
}

// moduleName is the kernel's own spelling: file names may use - where it uses _.
func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

// loadOrder lists wanted modules and their dependencies, each after the modules that it needs. Unknown
// modules are left out: they are built in.
func loadOrder(wanted []string, lookup func(string) (depends []string, known bool, err error)) ([]string, error) {
	var order []string
	seen := map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		if seen[name] {
			return nil
		}
		seen[name] = true
		depends, known, err := lookup(name)
		if err != nil {
			return fmt.Errorf("module %s: %w", name, err)
		}
		for _, d := range depends {
			if err := visit(d); err != nil {
				return err
			}
		}
		if known {
			order = append(order, name)
		}
		return nil
	}
	for _, name := range wanted {
		if err := visit(moduleName(name)); err != nil {
			return nil, err
		}
	}
	return order, nil
}

// readModule reads a module, decompressed.
func readModule(file string) ([]byte, error) {
	switch filepath.Ext(file) {
	case ".ko":
		return os.ReadFile(file)
	case ".xz":
		out, err := exec.Command("xz", "-dc", file).Output()
		if err != nil {
			return nil, fmt.Errorf("xz -dc %s: %w", file, err)
		}
		return out, nil
	}
	return nil, fmt.Errorf("%s: unknown compression", file)
}

// moduleDepends reads "depends=" of the .modinfo section: NUL-terminated key=value
// strings, this value a comma separated list of module names.
func moduleDepends(module []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("no .modinfo section")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	var depends []string
	for _, entry := range strings.Split(string(info), "\x00") {
		if list, is := strings.CutPrefix(entry, "depends="); is {
			for _, name := range split(list) {
				depends = append(depends, moduleName(name))
			}
		}
	}
	return depends, nil
}
