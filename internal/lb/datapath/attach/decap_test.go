package attach

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// tunnelProgram is the program for packets out of tunnels that an interface has; 0: none.
func tunnelProgram(t *testing.T, d *Plane, iface string) (id uint32) {
	t.Helper()
	index, known := d.IndexOf(device(t, iface).Attrs().Index)
	if !known {
		return 0
	}
	if err := d.TunnelPrograms().Lookup(index, &id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Fatal(err)
	}
	return id
}

// TestTunnelledComesAndGoes: the program for packets out of tunnels is there before the program that calls it, follows the interface's own
// program, outlives the process, and goes with its caller, or with the interface.
func TestTunnelledComesAndGoes(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	attach := func() {
		t.Helper()
		_, err := d.Attach("shunt-a", model.AttachNative)
		must(t, err)
	}
	attach()
	plain := loadedSize(t, "shunt-a")
	fails := errors.New("the caller cannot be loaded")
	decapsulate := func(tunnelled bool, fault error) error {
		return d.Decapsulate("shunt-a", tunnelled, func(shared map[string]*ebpf.Map, index uint32) (*ebpf.Program, error) {
			own, known := d.IndexOf(device(t, "shunt-a").Attrs().Index)
			if shared[abi.MapTunnelProgs] == nil || !known || own != index {
				t.Errorf("the caller gets maps %v and index %d", shared, index)
			}
			if tunnelled && tunnelProgram(t, d, "shunt-a") == 0 {
				t.Error("the caller comes first")
			}
			return d.attached["shunt-a"].programs[0], fault
		})
	}
	if err := decapsulate(true, fails); !errors.Is(err, fails) {
		t.Errorf("a caller that cannot be loaded: %v", err)
	}
	must(t, decapsulate(true, nil))
	first := tunnelProgram(t, d, "shunt-a")
	if first == 0 {
		t.Fatal("there is no program for packets out of tunnels")
	}
	must(t, d.require(abi.FEATURE_MSS))
	second := tunnelProgram(t, d, "shunt-a")
	if second == first || second == 0 {
		t.Errorf("with another feature the program is %d, before %d", second, first)
	}
	must(t, d.Close()) // as when the daemon ends: what is pinned goes on
	d = mustOpen(t, opts)
	if now := tunnelProgram(t, d, "shunt-a"); now != second {
		t.Errorf("after a restart the program is %d, before %d", now, second)
	}
	if d.features&abi.FEATURE_TUNNELLED == 0 || d.features&abi.FEATURE_MSS != 0 {
		t.Errorf("after a restart the features in use are %#x", d.features)
	}
	attach()
	if loadedSize(t, "shunt-a") <= plain {
		t.Error("after a restart the interface's program has no second level")
	}
	must(t, decapsulate(true, nil))
	attach() // again: it is a replacement
	must(t, d.require(abi.FEATURE_MSS))
	if now := tunnelProgram(t, d, "shunt-a"); now == 0 || now == second {
		t.Errorf("loaded anew, the program is %d, before the restart %d", now, second)
	}
	must(t, decapsulate(false, nil))
	if now := tunnelProgram(t, d, "shunt-a"); now != 0 {
		t.Errorf("for the stack, the program is %d", now)
	}
	must(t, decapsulate(true, nil))
	must(t, d.StopDecapsulating("shunt-a"))
	if now := tunnelProgram(t, d, "shunt-a"); now != 0 || d.attached["shunt-a"].tunnelled {
		t.Errorf("switched off, the program is %d", now)
	}
	must(t, d.StopDecapsulating("shunt-a"))
	must(t, decapsulate(true, nil))
	must(t, d.Detach("shunt-a"))
	if d.TunnelPrograms().Iterate().Next(new(uint32), new(uint32)) {
		t.Error("the program is left of an interface that was detached")
	}
	if err := decapsulate(true, nil); err == nil {
		t.Error("an interface without a program was taken")
	}
}

// TestTunnelledThatCannotBeLoaded: the interface's own program stays, and another try succeeds.
func TestTunnelledThatCannotBeLoaded(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	fault, broken := errors.New("no such object"), true
	version := *abi.Built()
	version.Objects = map[string]func() (*ebpf.CollectionSpec, error){}
	for name, load := range abi.Built().Objects {
		version.Objects[name] = func() (*ebpf.CollectionSpec, error) {
			if broken && name == abi.ObjectTunnelled {
				return nil, fault
			}
			return load()
		}
	}
	opts.Version = &version
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	load := func(map[string]*ebpf.Map, uint32) (*ebpf.Program, error) {
		return d.attached["shunt-a"].programs[0], nil
	}
	if err := d.Decapsulate("shunt-a", true, load); !errors.Is(err, fault) {
		t.Errorf("without the object: %v", err)
	}
	if decaps, err := store.PinnedDecap(opts.MapDir(version.ABI), uint32(device(t, "shunt-a").Attrs().Index)); decaps || err != nil {
		t.Errorf("the interface decapsulates: %v, %v", decaps, err)
	}
	broken = false
	must(t, d.Decapsulate("shunt-a", true, load))
	broken = true
	before := programID(t, "shunt-a")
	if err := d.require(abi.FEATURE_MSS); !errors.Is(err, fault) {
		t.Errorf("loaded anew without the object: %v", err)
	}
	if programID(t, "shunt-a") != before || tunnelProgram(t, d, "shunt-a") == 0 {
		t.Error("the interface has another program, or none for packets out of tunnels")
	}
}
