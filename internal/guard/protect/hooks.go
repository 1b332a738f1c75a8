package protect

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// Refusal is the reason why this kernel does not enforce a policy, with a remedy.
type Refusal struct {
	Reason string // the kernel's
	Remedy string
	err    error
}

func (r *Refusal) Error() string {
	return fmt.Sprintf("this kernel does not let BPF programs decide (BPF LSM): %s. %s", r.Reason, r.Remedy)
}

func (r *Refusal) Unwrap() error { return r.err }

// Two forms of a program; a kernel's hook has the arguments of one.
const (
	setattrPlain  = guardProgShSetattr
	setattrMapped = guardProgShSetattrMap
)

// object returns the programs that fit this kernel.
func object(types *btf.Spec) (*ebpf.CollectionSpec, error) {
	spec, err := loadGuard()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object of the guard: %w", err)
	}
	for name, program := range spec.Programs {
		if program.Type != ebpf.LSM {
			continue
		}
		var hook *btf.Func
		err := types.TypeByName("bpf_lsm_"+program.AttachTo, &hook)
		switch {
		case errors.Is(err, btf.ErrNotFound) && slices.Contains([]string{guardProgShSetAcl, guardProgShRemoveAcl}, name):
			delete(spec.Programs, name) // before 6.2 ACLs are extended attributes, for which there is another program
		case err != nil:
			return nil, &Refusal{fmt.Sprintf("it has no hook %s (%v)", program.AttachTo, err), "A kernel with CONFIG_BPF_LSM=y is needed", err}
		case program.AttachTo == "inode_setattr":
			// 6.12 has one argument more than 6.1, as the first: the mount's mapping of users.
			arguments := len(hook.Type.(*btf.FuncProto).Params)
			if (name == setattrMapped) != (arguments == 3) {
				delete(spec.Programs, name)
			}
		}
	}
	return spec, nil
}

// load loads all programs with these maps.
func load(pinned map[string]*ebpf.Map) (*ebpf.Collection, error) {
	types, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, &Refusal{fmt.Sprintf("it does not describe its types (%v)", err), "A kernel with CONFIG_DEBUG_INFO_BTF=y is needed", err}
	}
	spec, err := object(types)
	if err != nil {
		return nil, err
	}
	coll, err := kernel.Load(spec, nil, pinned)
	if err != nil {
		return nil, activeModules().refusal(err, os.Geteuid() == 0)
	}
	return coll, nil
}

// Enforces finds out whether this kernel would enforce policies that are loaded from here. It attaches all programs for
// a moment, with maps of their own that have no policy, because a kernel may load them and refuse to attach them. If
// the kernel would not, the error has a *Refusal; any other error is the reason why the programs cannot be loaded from
// here.
func Enforces() error {
	if r := activeModules().inactive(); r != nil {
		return r
	}
	coll, err := load(nil)
	if err != nil {
		return err
	}
	defer coll.Close()
	for _, name := range slices.Sorted(maps.Keys(coll.Programs)) {
		l, err := attachOne(coll.Programs[name], name)
		if err != nil {
			return err
		}
		if l != nil {
			defer l.Close() //nolint:errcheck,gocritic // an error changes nothing; all are attached at once, as in Start
		}
	}
	return judge.SeesProcesses()
}

// attachOne attaches a program to its hook; nil: it has none.
func attachOne(program *ebpf.Program, name string) (l link.Link, err error) {
	switch program.Type() {
	case ebpf.LSM:
		l, err = kernel.AttachLSM(program, name)
	case ebpf.Tracing:
		l, err = kernel.AttachTracing(program, name)
	}
	if err != nil {
		return nil, activeModules().refusal(err, true)
	}
	return l, nil
}

// modules are the kernel's active security modules, in their order, as securityfs lists them.
type modules struct {
	list  string
	known bool // securityfs is mounted
}

func activeModules() modules {
	text, err := os.ReadFile("/sys/kernel/security/lsm")
	return modules{strings.TrimSpace(string(text)), err == nil}
}

// inactive returns the refusal of a kernel that loads these programs and runs none of them; nil: it runs them, or that
// is not known.
func (m modules) inactive() *Refusal {
	if !m.known || slices.Contains(strings.Split(m.list, ","), "bpf") {
		return nil
	}
	return &Refusal{fmt.Sprintf("bpf is not among its active security modules (%s)", m.list), "Boot with lsm=" + strings.TrimPrefix(m.list+",bpf", ",") + " on the kernel's command line", nil}
}

// refusal finds out whether the kernel refuses all of these programs, or only one of them.
func (m modules) refusal(err error, isRoot bool) error {
	if r := m.inactive(); r != nil {
		r.err = err
		return r
	}
	switch {
	case errors.Is(err, unix.EPERM) && !isRoot:
		return &Refusal{"only root may load them", "Run it as root", err}
	case errors.Is(err, unix.EPERM) && m.known:
		return &Refusal{"it refuses to load them and does not say why (EPERM), though bpf is among its active security modules", "Boot a kernel that allows BPF trampolines", err}
	case errors.Is(err, unix.EPERM):
		return &Refusal{"it refuses to load them and does not say why (EPERM)", "Look whether bpf is among the active security modules: mount -t securityfs securityfs /sys/kernel/security, " +
			"then read lsm there. If it is, boot a kernel that allows BPF trampolines", err}
	}
	return fmt.Errorf("load the guard's programs: %w", err)
}

// abi is the layout of the pinned maps.
const abi = 5

// product is the folder of the guard's pins.
const product = "_guard"

// pins returns the maps that outlive the agent.
func pins(root string) (*kernel.MapSet, error) {
	spec, err := loadGuard()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object of the guard: %w", err)
	}
	for _, own := range []string{event.MapEvents, event.MapSequence, guardMapShG_audits, guardMapShG_auditsSeq} { // each agent has its own
		delete(spec.Maps, own)
	}
	return kernel.NewMapSet(spec, kernel.MapDirectory(root, product, abi), nil, "run `shunt guard stop` first")
}

// oneLayout returns an error if another version has pinned a guard whose maps have another layout.
func oneLayout(root string) error {
	pinned, err := kernel.PinnedABIs(root, product)
	if err != nil {
		return err
	}
	for _, other := range pinned {
		if other != abi {
			return fmt.Errorf("this machine is protected by another version of shunt, whose guard has pins of layout %d in %s. This version has layout %d, and cannot take them over. End that protection with `shunt guard stop`, and run the command again",
				other, kernel.MapDirectory(root, product, other), abi)
		}
	}
	return nil
}

func linksFolder(root string) string { return filepath.Join(kernel.Directory(root, product), "links") }

// attach attaches programs and pins the links. It removes the links of an earlier agent after that, so the protection never
// pauses. It leaves out the programs of the files of cgroups, unless isGrouped. It returns the folder of the pins.
func attach(root string, coll *ebpf.Collection, isGrouped bool) (_ string, err error) {
	folder := linksFolder(root)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return "", fmt.Errorf("make the folder %s for the links: %w", folder, err)
	}
	earlier, err := os.ReadDir(folder)
	if err != nil {
		return "", fmt.Errorf("list the links in %s: %w", folder, err)
	}
	number := 0
	for _, e := range earlier {
		var n int
		if _, err := fmt.Sscanf(e.Name(), "%d", &n); err == nil {
			number = max(number, n)
		}
	}
	mine := filepath.Join(folder, fmt.Sprint(number+1))
	if err := os.Mkdir(mine, 0o700); err != nil {
		return "", fmt.Errorf("make the folder %s for the links: %w", mine, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removeLinks(mine))
		}
	}()
	for _, name := range slices.Sorted(maps.Keys(coll.Programs)) {
		if slices.Contains(ofGroups, name) && !isGrouped {
			continue
		}
		if err := attachIn(mine, coll, name); err != nil {
			return "", err
		}
	}
	for _, e := range earlier {
		err = errors.Join(err, removeLinks(filepath.Join(folder, e.Name())))
	}
	return mine, err
}

// attachIn attaches a program, if it has a hook, and pins the link in a folder.
func attachIn(folder string, coll *ebpf.Collection, name string) error {
	l, err := attachOne(coll.Programs[name], name)
	if l == nil || err != nil {
		return err
	}
	if err := kernel.PinLink(l, filepath.Join(folder, name)); err != nil {
		return err
	}
	return l.Close()
}

// ofGroups are the programs that judge writes to files of cgroups. One runs for each folder of each path, the other at each read and write, so they are
// attached only while a rule protects processes by their cgroup.
var ofGroups = []string{guardProgShControl, guardProgShControlFd}

// watchGroups attaches the programs that judge writes to files of cgroups, or detaches them. Calls that change nothing do no harm.
func (g *Guard) watchGroups(isGrouped bool) error {
	var pins []string
	for _, name := range ofGroups {
		pin := filepath.Join(g.links, name)
		_, err := os.Lstat(pin)
		switch isThere := err == nil; {
		case isThere && !isGrouped:
			pins = append(pins, pin)
		case !isThere && isGrouped:
			if err := attachIn(g.links, g.coll, name); err != nil {
				return err
			}
		}
	}
	return removePins(pins...)
}

// detachLimit bounds the time until the kernel ends links whose pins are gone: it ends them later, in a work queue.
const detachLimit = 30 * time.Second

// removeLinks ends the links that are pinned in a folder, waits until they are gone, and removes the folder.
func removeLinks(folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return fmt.Errorf("list the links in %s: %w", folder, err)
	}
	var pins []string
	for _, e := range entries {
		pins = append(pins, filepath.Join(folder, e.Name()))
	}
	return errors.Join(removePins(pins...), os.Remove(folder))
}

// removePins ends pinned links, and waits until the kernel has none of them.
func removePins(pins ...string) error {
	var errs []error
	var ids []link.ID
	for _, path := range pins {
		if l, err := link.LoadPinnedLink(path, nil); err == nil {
			if info, err := l.Info(); err == nil {
				ids = append(ids, info.ID)
			}
			_ = l.Close()
		}
		errs = append(errs, os.Remove(path))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	until := time.Now().Add(detachLimit)
	for _, id := range ids {
		for isThere(id) {
			if time.Now().After(until) {
				return fmt.Errorf("end the links that were pinned in %s: another process holds them; `bpftool link` lists them", filepath.Dir(pins[0]))
			}
			time.Sleep(time.Millisecond)
		}
	}
	return nil
}

func isThere(id link.ID) bool {
	l, err := link.NewFromID(id)
	if err != nil {
		return false
	}
	_ = l.Close()
	return true
}

// Stop removes the protection and all its parts; false: there is none.
func Stop(root string) (bool, error) {
	home := kernel.Directory(root, product)
	if _, err := os.Stat(home); errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	var errs []error
	if state, err := kernel.OpenMap(filepath.Join(kernel.MapDirectory(root, product, abi), guardMapShG_state)); err == nil {
		errs = append(errs, state.Put(uint32(0), &guardGuardState{}), state.Close()) // from here on nothing is denied
	}
	if sets, err := os.ReadDir(linksFolder(root)); err == nil {
		for _, e := range sets {
			errs = append(errs, removeLinks(filepath.Join(linksFolder(root), e.Name())))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return true, fmt.Errorf("remove the protection: %w", err)
	}
	if err := os.RemoveAll(home); err != nil {
		return true, fmt.Errorf("remove the pins in %s: %w", home, err)
	}
	_ = os.Remove(kernel.Home(root)) // it is removed if it is empty
	return true, nil
}
