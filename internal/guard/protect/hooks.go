package protect

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// Refusal is why this kernel does not enforce a policy, and what to do.
type Refusal struct {
	Reason string // the kernel's
	Remedy string
	err    error
}

func (r *Refusal) Error() string {
	return fmt.Sprintf("this kernel does not let BPF programs decide (BPF LSM): %s. %s", r.Reason, r.Remedy)
}

func (r *Refusal) Unwrap() error { return r.err }

// Two forms of a program, of which a kernel has the arguments of one.
const (
	setattrPlain  = guardProgShSetattr
	setattrMapped = guardProgShSetattrMap
)

// object is the programs that fit this kernel.
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
			delete(spec.Programs, name) // before 6.2 ACLs are extended attributes, which another program sees
		case err != nil:
			return nil, &Refusal{fmt.Sprintf("it has no hook %s (%v)", program.AttachTo, err), "A kernel with CONFIG_BPF_LSM=y is needed", err}
		case program.AttachTo == "inode_setattr":
			// Its first argument is the mount's mapping of users since 6.8.
			arguments := len(hook.Type.(*btf.FuncProto).Params)
			if (name == setattrMapped) != (arguments == 3) {
				delete(spec.Programs, name)
			}
		}
	}
	return spec, nil
}

// load loads all programs over these maps.
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
		return nil, refusal(err)
	}
	return coll, nil
}

// refusal tells a kernel that refuses all such programs from one that refuses a program.
func refusal(err error) error {
	active, readErr := os.ReadFile("/sys/kernel/security/lsm")
	isOn := readErr != nil || slices.Contains(strings.Split(strings.TrimSpace(string(active)), ","), "bpf")
	switch {
	case !isOn:
		return &Refusal{fmt.Sprintf("bpf is not among its active security modules (%s)", strings.TrimSpace(string(active))),
			"Boot with lsm=" + strings.TrimSpace(string(active)) + ",bpf on the kernel's command line", err}
	case errors.Is(err, unix.EPERM) && os.Geteuid() != 0:
		return &Refusal{"it permits that to root only", "Run it as root", err}
	case errors.Is(err, unix.EPERM):
		return &Refusal{fmt.Sprintf("it refuses to load them, without saying why (%v)", unix.EPERM), "bpf is among its active security modules, so the kernel itself has to be another one: one that allows BPF trampolines", err}
	}
	return fmt.Errorf("load the guard's programs: %w", err)
}

// inactive is set where the module is not active and the programs load nevertheless: then nothing runs them.
func inactive() error {
	active, err := os.ReadFile("/sys/kernel/security/lsm")
	if err != nil {
		return nil // securityfs is not mounted; the probe of Start tells
	}
	list := strings.TrimSpace(string(active))
	if slices.Contains(strings.Split(list, ","), "bpf") {
		return nil
	}
	return &Refusal{fmt.Sprintf("bpf is not among its active security modules (%s)", list), "Boot with lsm=" + list + ",bpf on the kernel's command line", nil}
}

// abi is of the pinned maps.
const abi = 1

// product is the folder of the guard's pins.
const product = "_guard"

// pins are the maps that outlive the agent.
func pins(root string) (*kernel.MapSet, error) {
	spec, err := loadGuard()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object of the guard: %w", err)
	}
	delete(spec.Maps, event.MapEvents) // each agent has its own
	delete(spec.Maps, event.MapSequence)
	return kernel.NewMapSet(spec, kernel.MapDirectory(root, product, abi), nil, "run `shunt guard stop` first")
}

func linksFolder(root string) string { return filepath.Join(kernel.Directory(root, product), "links") }

// attach puts all programs at their hooks and pins the links. Those of an earlier agent are removed after
// that, so there is no moment without.
func attach(root string, coll *ebpf.Collection) (err error) {
	folder := linksFolder(root)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return fmt.Errorf("make the folder %s for the links: %w", folder, err)
	}
	earlier, err := os.ReadDir(folder)
	if err != nil {
		return fmt.Errorf("list the links in %s: %w", folder, err)
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
		return fmt.Errorf("make the folder %s for the links: %w", mine, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removeLinks(mine))
		}
	}()
	for _, name := range slices.Sorted(maps.Keys(coll.Programs)) {
		if coll.Programs[name].Type() != ebpf.LSM {
			continue
		}
		l, err := link.AttachLSM(link.LSMOptions{Program: coll.Programs[name]})
		if err != nil {
			return refusal(fmt.Errorf("attach %s: %w", name, err))
		}
		err = l.Pin(filepath.Join(mine, name))
		_ = l.Close()
		if err != nil {
			return fmt.Errorf("pin the link of %s: %w", name, err)
		}
	}
	for _, e := range earlier {
		err = errors.Join(err, removeLinks(filepath.Join(folder, e.Name())))
	}
	return err
}

// removeLinks ends the links that are pinned in a folder, and removes it.
func removeLinks(folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return fmt.Errorf("list the links in %s: %w", folder, err)
	}
	var errs []error
	for _, e := range entries {
		errs = append(errs, os.Remove(filepath.Join(folder, e.Name())))
	}
	return errors.Join(append(errs, os.Remove(folder))...)
}

// Stop removes the protection and everything of it; false: there is none.
func Stop(root string) (bool, error) {
	home := kernel.Directory(root, product)
	if _, err := os.Stat(home); errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	var errs []error
	if sets, err := os.ReadDir(linksFolder(root)); err == nil {
		for _, e := range sets {
			errs = append(errs, removeLinks(filepath.Join(linksFolder(root), e.Name())))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return true, fmt.Errorf("remove the protection: %w", err)
	}
	if err := os.RemoveAll(home); err != nil {
		return true, fmt.Errorf("remove what is pinned in %s: %w", home, err)
	}
	_ = os.Remove(kernel.Home(root)) // if nothing else of shunt is there
	return true, nil
}
