package connect

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// product is the folder of the pins, and layout its folder for this version's layout: in that, each policy has a folder, named by a number.
const (
	product = "_connections"
	layout  = "layout-2"
)

func generation(root string, number int) string {
	return filepath.Join(kernel.Directory(root, product), layout, strconv.Itoa(number))
}

// entriesOf lists a folder of pins, which need not exist.
func entriesOf(folder string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the links that deny connections: %w", err)
	}
	return entries, nil
}

// others returns the folders of versions whose pins have another layout.
func others(root string) (folders []string, err error) {
	home := kernel.Directory(root, product)
	entries, err := entriesOf(home)
	for _, e := range entries {
		if e.Name() != layout {
			folders = append(folders, filepath.Join(home, e.Name()))
		}
	}
	return folders, err
}

// generations returns the numbers of the folders, in ascending order.
func generations(root string) (all []int, err error) {
	foreign, err := others(root)
	if err != nil {
		return nil, err
	}
	if len(foreign) > 0 {
		return nil, fmt.Errorf("another version of shunt denies connections, with pins of its own in %s: end that with `shunt guard stop`, and run the command again", foreign[0])
	}
	entries, err := entriesOf(filepath.Join(kernel.Directory(root, product), layout))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if number, err := strconv.Atoi(e.Name()); err == nil {
			all = append(all, number)
		}
	}
	slices.Sort(all)
	return all, nil
}

// pinned are the maps that are pinned with the programs.
var pinned = []string{connectMapShC_policy, connectMapShC_programs, connectMapShC_targets, connectMapShC_tasks, connectMapShC_counts, connectMapShC_rules}

func mapPath(folder, name string) string { return filepath.Join(folder, "maps", name) }

func linksFolder(folder string) string { return filepath.Join(folder, "links") }

// openPinned opens the maps of a policy.
func openPinned(folder string) (map[string]*ebpf.Map, error) {
	maps := map[string]*ebpf.Map{}
	for _, name := range pinned {
		m, err := kernel.OpenMap(mapPath(folder, name))
		if err != nil {
			kernel.CloseMaps(maps)
			return nil, err
		}
		maps[name] = m
	}
	return maps, nil
}

// trackers are the programs that follow the programs that processes start.
var trackers = []string{connectProgShEnd, connectProgShExec, connectProgShFork}

// decide returns the programs that decide for rules.
func decide(way Way, rules []policy.Connection) (names []string) {
	for _, r := range rules {
		for _, operation := range r.Deny {
			names = append(names, deciders[way][operation]...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// load loads the programs and maps for the rules, by the best way that works, over the counts of the policy before.
func load(rules []policy.Connection, o Options, before map[string]*ebpf.Map) (*ebpf.Collection, Coverage, error) {
	if o.Way == Cgroup {
		coll, err := loadFor(Cgroup, rules, o, before)
		return coll, Coverage{Cgroup, "it is asked for"}, err
	}
	coll, err := loadFor(LSM, rules, o, before)
	why := hooksRefuse(modules(), err)
	if why == "" || o.Way == LSM {
		return coll, Coverage{Way: LSM}, err
	}
	if err == nil {
		coll.Close()
	}
	coll, err = loadFor(Cgroup, rules, o, before)
	return coll, Coverage{Cgroup, why}, err
}

func loadFor(way Way, rules []policy.Connection, o Options, before map[string]*ebpf.Map) (*ebpf.Collection, error) {
	needed := append(decide(way, rules), connectProgShFile)
	if slices.ContainsFunc(rules, func(r policy.Connection) bool { return r.Children }) {
		needed = append(needed, connectProgShWalk)
		needed = append(needed, trackers...)
	}
	constants := map[string]any{}
	if way == LSM && o.Cgroup != "" {
		id, err := cgroup.ID(o.Cgroup)
		if err != nil {
			return nil, err
		}
		level, err := cgroup.Level(o.Cgroup)
		if err != nil {
			return nil, err
		}
		constants["only_cgroup"], constants["only_level"] = id, level
	}
	replaced := map[string]*ebpf.Map{}
	if counts := before[connectMapShC_counts]; counts != nil {
		replaced[connectMapShC_counts] = counts
	}
	return loadOnly(needed, constants, replaced)
}

func loadOnly(programs []string, constants map[string]any, maps map[string]*ebpf.Map) (*ebpf.Collection, error) {
	spec, err := loadConnect()
	if err != nil {
		return nil, fmt.Errorf("read the programs that deny connections: %w", err)
	}
	for name := range spec.Programs {
		if !slices.Contains(programs, name) {
			delete(spec.Programs, name)
		}
	}
	coll, err := kernel.Load(spec, constants, maps)
	if err != nil {
		return nil, fmt.Errorf("load the programs that deny connections: %w", err)
	}
	return coll, nil
}

// fill writes the rules' programs and addresses, and returns the mask of the rules that also hold for children.
func fill(coll *ebpf.Collection, rules []policy.Connection) (children uint64, err error) {
	programs := map[connectGuardFile]uint64{}
	number := uint32(0)
	for i, r := range rules {
		file, err := programOf(coll.Programs[connectProgShFile], r)
		if err != nil {
			return 0, err
		}
		programs[file] |= 1 << i
		if r.Children {
			children |= 1 << i
		}
		for j, at := range slices.Concat(r.To, r.Except) {
			t := targetOf(at)
			if j < len(r.To) {
				t.Rules = 1 << i
			} else {
				t.Spares = 1 << i
			}
			if err := coll.Maps[connectMapShC_targets].Put(number, &t); err != nil {
				return 0, fmt.Errorf("write the address %v of rule %q: %w", at, r.Name, err)
			}
			number++
		}
		var text connectGuardRule
		put(text.Name[:], r.Name)
		put(text.Text[:], r.String())
		text.Trust = digest(r)
		if err := coll.Maps[connectMapShC_rules].Put(uint32(i), &text); err != nil {
			return 0, fmt.Errorf("write the names of the rules: %w", err)
		}
	}
	for word, bits := range filterOf(programs) {
		if err := coll.Maps[connectMapShC_filter].Put(uint32(word), bits); err != nil {
			return 0, fmt.Errorf("write the programs that need no look-up: %w", err)
		}
	}
	for file, mask := range programs {
		if err := coll.Maps[connectMapShC_programs].Put(&file, &mask); err != nil {
			return 0, fmt.Errorf("write the programs of the rules: %w", err)
		}
	}
	return children, nil
}

// filterOf returns the bits of the programs' inode numbers, as sh_c_filter has them.
func filterOf(programs map[connectGuardFile]uint64) (words [connectConnectConstantCONNECT_FILTER_BITS / 64]uint64) {
	for file := range programs {
		bit := file.Inode % uint64(connectConnectConstantCONNECT_FILTER_BITS)
		words[bit/64] |= 1 << (bit % 64)
	}
	return words
}

// put writes text, cut so that a zero follows.
func put(to []int8, text string) {
	for i := range min(len(text), len(to)-1) {
		to[i] = int8(text[i])
	}
}

// digest identifies the processes of a rule: rules of two policies with the same digest are for the same processes.
func digest(r policy.Connection) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\x00%v", r.Program, r.Children)
	return h.Sum64()
}

// programOf returns the file of a rule's program. It checks the path, and checks it again on the opened file.
func programOf(program *ebpf.Program, r policy.Connection) (file connectGuardFile, err error) {
	about := fmt.Sprintf("rule %q at %s", r.Name, r.At)
	straight, err := filepath.EvalSymlinks(r.Program)
	if err != nil {
		return file, fmt.Errorf("%s: find the program: %w. It must be there when the policy is loaded", about, err)
	}
	if straight != r.Program {
		return file, fmt.Errorf("%s: %s leads through a symbolic link: write %s", about, r.Program, straight)
	}
	f, err := os.OpenFile(r.Program, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return file, fmt.Errorf("%s: open the program: %w", about, err)
	}
	defer f.Close() //nolint:errcheck // only read
	info, err := f.Stat()
	if err != nil {
		return file, fmt.Errorf("%s: look at the program: %w", about, err)
	}
	begin := make([]byte, 2)
	if n, _ := f.ReadAt(begin, 0); !info.Mode().IsRegular() || info.Mode()&0o111 == 0 || n < len(begin) {
		return file, fmt.Errorf("%s: %s is no program that can be executed", about, r.Program)
	}
	if bytes.Equal(begin, []byte("#!")) {
		return file, fmt.Errorf("%s: %s is a script, and the process of a script runs its interpreter. Name the program that starts it, with children: true", about, r.Program)
	}
	return fileOf(program, f)
}

// fileOf asks the kernel for its identity of a file.
func fileOf(program *ebpf.Program, f *os.File) (connectGuardFile, error) {
	question := connectConnectFile{Fd: uint64(f.Fd())}
	if err := run(program, &question); err != nil {
		return connectGuardFile{}, fmt.Errorf("ask the kernel for the identity of %s: %w", f.Name(), err)
	}
	if question.File == (connectGuardFile{}) {
		return connectGuardFile{}, fmt.Errorf("ask the kernel for the identity of %s: it has none; this is a fault in shunt", f.Name())
	}
	return question.File, nil
}

// run runs a program of the type syscall, which answers in its argument.
func run[T any](program *ebpf.Program, question *T) error {
	var b bytes.Buffer
	if err := binary.Write(&b, binary.NativeEndian, question); err != nil {
		return err
	}
	context := b.Bytes()
	if _, err := program.Run(&ebpf.RunOptions{Context: context, ContextOut: context}); err != nil {
		return err
	}
	return binary.Read(bytes.NewReader(context), binary.NativeEndian, question)
}

// targetOf returns a target as the programs have it.
func targetOf(t policy.Target) connectConnectTarget {
	raw := connectConnectTarget{PortFirst: t.First, PortLast: t.Last}
	if !t.Prefix.IsValid() {
		return raw
	}
	raw.Address = t.Prefix.Addr().As16()
	bits := t.Prefix.Bits()
	raw.Version = 6
	if t.Prefix.Addr().Is4() {
		bits += 96
		raw.Version = 4
	}
	for i := range bits {
		raw.Mask[i/8] |= 0x80 >> (i % 8)
	}
	return raw
}

// addressFrom returns the address in an event.
func addressFrom(raw [16]uint8) netip.Addr { return netip.AddrFrom16(raw).Unmap() }

// operations maps the words to their numbers.
var operations = map[string]connectConnectOp{
	policy.Connect: connectConnectOpCONNECT_CONNECT, policy.Bind: connectConnectOpCONNECT_BIND, policy.Listen: connectConnectOpCONNECT_LISTEN,
	policy.Accept: connectConnectOpCONNECT_ACCEPT, policy.Raw: connectConnectOpCONNECT_RAW,
}

func wordOf(op connectConnectOp) string {
	for word, number := range operations {
		if number == op {
			return word
		}
	}
	return fmt.Sprintf("operation-%d", op)
}

// policyOf returns the rules as the programs have them.
func policyOf(rules []policy.Connection) (p connectConnectPolicy) {
	p.LoadedNs = bootNow()
	for i, r := range rules {
		for _, word := range r.Deny {
			masks := &p.Ops[operations[word]]
			if r.Mode == policy.Deny {
				masks.Denied |= 1 << i
			} else {
				masks.Audited |= 1 << i
			}
		}
		if r.Children {
			p.Children |= 1 << i
		}
		if len(r.To) == 0 {
			p.Everywhere |= 1 << i
		}
		if len(r.Except) > 0 {
			p.Spares |= 1 << i
		}
		p.TargetCount += uint32(len(r.To) + len(r.Except))
	}
	return p
}

func pinMaps(coll *ebpf.Collection, folder string) error {
	for _, sub := range []string{filepath.Join(folder, "maps"), linksFolder(folder)} {
		if err := os.MkdirAll(sub, 0o700); err != nil {
			return fmt.Errorf("make a folder for the pins that deny connections: %w", err)
		}
	}
	for _, name := range pinned {
		m := coll.Maps[name]
		own, err := m.Clone() // Pin would move the map of the policy before
		if err == nil {
			err = errors.Join(own.Pin(mapPath(folder, name)), own.Close())
		}
		if err != nil {
			return fmt.Errorf("pin the map %s in %s: %w", name, folder, err)
		}
	}
	return nil
}

// attach attaches the named programs that the collection has, and pins their links.
func attach(coll *ebpf.Collection, folder string, names []string, where string) error {
	for _, name := range names {
		program := coll.Programs[name]
		if program == nil {
			continue
		}
		l, err := attachOne(program, name, where)
		if err != nil {
			return err
		}
		if err := kernel.PinLink(l, filepath.Join(linksFolder(folder), name)); err != nil {
			return err
		}
		_ = l.Close()
	}
	return nil
}

// end removes the programs of a policy from the kernel; from the first step on it denies nothing.
func end(folder string) error {
	var errs []error
	if m, err := kernel.OpenMap(mapPath(folder, connectMapShC_policy)); err == nil {
		errs = append(errs, m.Put(uint32(0), &connectConnectPolicy{}), m.Close())
	}
	links, err := os.ReadDir(linksFolder(folder))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	for _, l := range links {
		errs = append(errs, kernel.RemoveLink(filepath.Join(linksFolder(folder), l.Name())))
	}
	errs = append(errs, os.RemoveAll(folder))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove the programs that deny connections from the kernel: %w", err)
	}
	return nil
}

// textOf returns a rule's name and text; empty: there is no rule of that number.
func textOf(rules *ebpf.Map, number uint32) (name, text string, err error) {
	var r connectGuardRule
	if err := rules.Lookup(number, &r); err != nil {
		return "", "", fmt.Errorf("read the rules of connections: %w", err)
	}
	return event.Text(r.Name[:]), event.Text(r.Text[:]), nil
}
