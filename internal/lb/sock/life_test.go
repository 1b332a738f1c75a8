package sock

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/test/space"
)

// linkIDs returns the ids of the pinned links, by name.
func (b *bed) linkIDs() map[string]link.ID {
	b.Helper()
	ids := map[string]link.ID{}
	for _, h := range hooks {
		l, err := link.LoadPinnedLink(filepath.Join(folder(kernel.DefaultPinRoot, b.options.Instance), h.pin), nil)
		must(b.T, err)
		info, err := l.Info()
		must(b.T, err)
		ids[h.pin] = info.ID
		must(b.T, l.Close())
	}
	return ids
}

// A process that ends leaves all in place and working; the next one replaces the programs in their
// links, and knows the backends that sockets have been given.
func TestOutlivesItsProcess(t *testing.T) {
	b := newBed(t)
	backend := b.listenUDP(first + ":5353")
	b.serve(service("dns", vip, one(53), backend))
	s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	s.wantAsk(vip+":53", backend, vip+":53")
	before := b.linkIDs()
	must(t, b.sockets.Close())
	s.wantAsk(vip+":53", backend, vip+":53")
	b.open()
	s.wantAsk(vip+":53", backend, vip+":53")
	if after := b.linkIDs(); len(after) != len(hooks) {
		t.Errorf("%d links are pinned, want %d", len(after), len(hooks))
	} else {
		for name, id := range after {
			if id != before[name] {
				t.Errorf("the link of %s is another one", name)
			}
		}
	}
	if chosen, kept := b.outcome("chosen"), b.outcome("kept"); chosen != 1 || kept != 2 {
		t.Errorf("chosen %d times and kept %d, want 1 and 2", chosen, kept)
	}
}

// After an upgrade the data plane has other maps; the programs of the next Open read those.
func TestFollowsTheMaps(t *testing.T) {
	b := newBed(t)
	old, fresh := b.listenUDP(first+":5353"), b.listenUDP(second+":5353")
	b.serve(service("dns", vip, one(53), old))
	b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0).wantAsk(vip+":53", old, vip+":53")
	must(t, b.sockets.Close())
	other := space.Open(t, store.Options{Instance: b.options.Instance + "-new", Limits: testLimits, Log: b.options.Log})
	b.maps, b.options.DataPlane = reconcile.New(other), other
	_, err := b.maps.Adopt()
	must(t, err)
	b.serve(service("dns", vip, one(53), fresh))
	b.open()
	b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0).wantAsk(vip+":53", fresh, vip+":53")
}

// With another cgroup, the processes of the first one are served no more.
func TestAnotherCgroup(t *testing.T) {
	b := newBed(t)
	b.serve(service("dns", vip, one(53), b.listenUDP(first+":5353")))
	must(t, b.sockets.Close())
	within := filepath.Join(b.cgroup, "within")
	must(t, os.Mkdir(within, 0o755))
	t.Cleanup(func() { must(t, os.Remove(within)) })
	b.options.Cgroup = within
	b.open()
	if err := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0).send(vip + ":53"); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("a process outside of the cgroup: %v, want %v", err, unix.ENETUNREACH)
	}
}

// Detach takes the programs off; removing the data plane does the same.
func TestDetach(t *testing.T) {
	for _, way := range []string{"Detach", "with the data plane"} {
		t.Run(way, func(t *testing.T) {
			b := newBare(t)
			b.serve(service("dns", vip, one(53), b.listenUDP(first+":5353")))
			sockets, err := Open(b.options)
			must(t, err)
			s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
			s.wantAsk(vip+":53", first+":5353", vip+":53")
			if way == "Detach" {
				must(t, sockets.Detach())
			} else {
				must(t, sockets.Close())
				must(t, attach.RemoveFrom(store.Options{Instance: b.options.Instance, Log: b.options.Log}))
			}
			// A link whose last pin has gone ends a moment later (bpf_link_put in kernel/bpf/syscall.c).
			eventually(t, "the program is taken off", func() bool { return errors.Is(s.send(vip+":53"), unix.ENETUNREACH) })
		})
	}
}

// Open refuses options that cannot work, and leaves nothing behind.
func TestRefuses(t *testing.T) {
	b := newBare(t)
	for path, want := range map[string]string{
		t.TempDir():                     "the path is in no cgroup2 file system; `findmnt -t cgroup2`",
		filepath.Join(b.cgroup, "gone"): "no such file or directory; `find /sys/fs/cgroup",
	} {
		options := b.options
		options.Cgroup = path
		if _, err := Open(options); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("cgroup %s: %v, want %q in it", path, err, want)
		}
		if _, err := os.Stat(folder(kernel.DefaultPinRoot, b.options.Instance)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("cgroup %s: the folder of the pins is there: %v", path, err)
		}
	}
	b.options.DataPlane = broken{}
	if _, err := Open(b.options); err == nil || !strings.Contains(err.Error(), "no maps") {
		t.Errorf("a data plane that cannot be read: %v", err)
	}
	if _, err := os.Stat(folder(kernel.DefaultPinRoot, b.options.Instance)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after a failure the folder of the pins is there: %v", err)
	}
}

type broken struct{}

func (broken) LoadBeside(func() (*ebpf.CollectionSpec, error), map[string]*ebpf.Map) (*ebpf.Collection, error) {
	return nil, errors.New("no maps")
}

// A map of another layout is made anew, and the rest goes on.
func TestAnotherLayout(t *testing.T) {
	b := newBed(t)
	b.serve(service("dns", vip, one(53), b.listenUDP(first+":5353")))
	must(t, b.sockets.Close())
	path := filepath.Join(folder(kernel.DefaultPinRoot, b.options.Instance), sockMapShSkOutcomes)
	must(t, os.Remove(path))
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 16, MaxEntries: 3})
	must(t, err)
	must(t, m.Pin(path))
	must(t, m.Close())
	b.open()
	b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0).wantAsk(vip+":53", first+":5353", vip+":53")
	if n := b.outcome("chosen"); n != 1 {
		t.Errorf("chosen %d times, want once", n)
	}
}

// The programs write to no map of the data plane: each call of a helper that writes to a map has a map of the
// programs' own in the first register.
func TestReadsOnly(t *testing.T) {
	spec, err := loadSock()
	must(t, err)
	writes := 0
	for name, program := range spec.Programs {
		first := ""
		for _, ins := range program.Instructions {
			if ins.Dst == asm.R1 && !ins.IsBuiltinCall() {
				first = ins.Reference()
			}
			if !ins.IsBuiltinCall() {
				continue
			}
			switch asm.BuiltinFunc(ins.Constant) {
			case asm.FnMapUpdateElem, asm.FnMapDeleteElem, asm.FnMapPushElem, asm.FnMapPopElem:
				writes++
				if first != sockMapShSkClients {
					t.Errorf("%s calls %s for %q", name, asm.BuiltinFunc(ins.Constant), first)
				}
			}
		}
	}
	if writes == 0 {
		t.Error("no write was found, not even of affinity")
	}
	for name := range spec.Programs {
		if len(name) > 15 || !strings.HasPrefix(name, "sh_") {
			t.Errorf("program %s: names begin with sh_ and have at most 15 characters", name)
		}
	}
}
