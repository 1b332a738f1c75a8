package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/bed"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

var (
	must            = bed.Must
	inNamespace     = bed.Namespace
	fill            = bed.Fill
	requireContents = bed.RequireContents
	quiet           = bed.Quiet
)

// testOptions returns the options of an instance of the test's own, which is removed after it.
func testOptions(t *testing.T) store.Options {
	t.Helper()
	return store.Options{Limits: bed.Limits, PinRoot: kernel.DefaultPinRoot, Log: quiet(), Instance: bed.Instance(t, func(instance string) error {
		return attach.Remove(instance, quiet())
	})}
}

func mustOpen(t *testing.T, opts store.Options) *Datapath {
	t.Helper()
	d, err := Open(opts)
	must(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	})
	return d
}

func TestReadOnlyWithoutDataPlane(t *testing.T) {
	if _, err := OpenReadOnly(testOptions(t)); !errors.Is(err, store.ErrNotLoaded) {
		t.Fatalf("got %v, want ErrNotLoaded", err)
	}
}

// TestOpenLeavesNothingWhereAProgramIsRefused: a failed start leaves no maps, so the next one may have other limits.
func TestOpenLeavesNothingWhereAProgramIsRefused(t *testing.T) {
	opts := testOptions(t)
	version := *abi.Built()
	version.Objects = maps.Clone(abi.Built().Objects)
	version.Objects[abi.ObjectSweep] = func() (*ebpf.CollectionSpec, error) {
		spec, err := abi.Built().Spec(abi.ObjectSweep)
		if err == nil {
			spec.Programs["sh_sweep"].Instructions = asm.Instructions{asm.Return()} // without a verdict
		}
		return spec, err
	}
	opts.Version = &version
	if _, err := Open(opts); err == nil || !strings.Contains(err.Error(), "the kernel's verifier refused a program") {
		t.Errorf("got %v, want the verifier's complaint", err)
	}
	pinned, err := attach.PinnedOf(opts.Instance)
	must(t, err)
	if len(pinned) > 0 {
		t.Errorf("left behind: %v", pinned)
	}
	opts.Version, opts.Limits = nil, bed.Limits
	opts.Limits.Flows *= 2
	mustOpen(t, opts)
}

// widened returns a next version whose maps have longer values, all zero at the end.
func widened(names ...string) *abi.Version {
	v := *abi.Built()
	v.ABI++
	v.Objects = maps.Clone(v.Objects)
	for object, load := range abi.Built().Objects {
		v.Objects[object] = func() (*ebpf.CollectionSpec, error) {
			spec, err := load()
			for _, name := range names {
				if m, ok := spec.Maps[name]; ok {
					m.ValueSize += 8
					m.Value = nil
				}
			}
			return spec, err
		}
	}
	step := abi.Step{From: v.ABI - 1, To: v.ABI, Maps: map[string]abi.Convert{}}
	for _, name := range names {
		step.Maps[name] = func(key, value []byte) ([]byte, []byte, error) {
			return key, append(bytes.Clone(value), make([]byte, 8)...), nil
		}
	}
	v.Steps = []abi.Step{step}
	return &v
}

func pinnedMap(t *testing.T, opts store.Options, number uint32, name string) *ebpf.Map {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(opts.MapDir(number), name), nil)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

// TestCarryMaps: maps that the daemon writes are copied, counters of programs are copied and count on,
// and all others are the same maps.
func TestCarryMaps(t *testing.T) {
	opts := testOptions(t)
	d := mustOpen(t, opts)
	want := fill(t, d)
	cpus, err := ebpf.PossibleCPU()
	must(t, err)
	counted := func(m *ebpf.Map, index uint32, words int, first uint64) {
		t.Helper()
		values := make([][]byte, cpus)
		for cpu := range values {
			values[cpu] = make([]byte, 8*words)
			binary.NativeEndian.PutUint64(values[cpu], first)
			binary.NativeEndian.PutUint64(values[cpu][8:], uint64(cpu))
		}
		must(t, m.Put(index, values))
	}
	counted(pinnedMap(t, opts, 1, abi.MapSvcTraffic), 3, 5, 100)
	counted(pinnedMap(t, opts, 1, abi.MapSvcTraffic), 5, 5, 7)
	flow := bytes.Repeat([]byte{1}, 40)
	must(t, pinnedMap(t, opts, 1, abi.MapFlows).Put(flow, make([]byte, 72)))
	must(t, d.Close())

	opts.Version = widened(abi.MapNames, abi.MapSvcTraffic)
	must(t, opts.Complete())
	opts.Version.At = func(p abi.Point) error {
		switch p {
		case abi.PointCopied: // an old program counts on
			counted(pinnedMap(t, opts, 1, abi.MapSvcTraffic), 3, 5, 110)
			counted(pinnedMap(t, opts, 1, abi.MapSvcTraffic), 4, 5, 3)
		case abi.PointSwitched: // and a new one
			counted(pinnedMap(t, opts, 2, abi.MapSvcTraffic), 3, 6, 101)
		}
		return nil
	}
	mustOpen(t, opts)
	for index, first := range map[uint32]uint64{3: 111, 4: 3, 5: 7, 6: 0} {
		var values [][]byte
		must(t, pinnedMap(t, opts, 2, abi.MapSvcTraffic).Lookup(index, &values))
		for cpu, v := range values {
			second := uint64(cpu)
			if first == 0 {
				second = 0
			}
			if len(v) != 48 || binary.NativeEndian.Uint64(v) != first || binary.NativeEndian.Uint64(v[8:]) != second {
				t.Errorf("counter %d of CPU %d is %v, want %d and %d", index, cpu, v, first, second)
			}
		}
	}
	names := 0
	var key, value []byte
	all := pinnedMap(t, opts, 2, abi.MapNames).Iterate()
	for all.Next(&key, &value) {
		names++
		index := binary.NativeEndian.Uint32(key[4:])
		if name := want.Services[index].Name; len(value) != 72 || string(bytes.TrimRight(value, "\x00")) != name {
			t.Errorf("service %d is called %q, want %q", index, value, name)
		}
	}
	must(t, all.Err())
	if names != len(want.Services) {
		t.Errorf("%d services have names, want %d", names, len(want.Services))
	}
	if value, err := pinnedMap(t, opts, 2, abi.MapFlows).LookupBytes(flow); err != nil || value == nil {
		t.Errorf("the flow table, whose layout is the same, is not the same: %v, %v", value, err)
	}
	if _, err := os.Stat(opts.MapDir(1)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old maps are still there: %v", err)
	}
}

// TestStepsThatAreRefused: a step that cannot be made while packets come is refused before anything
// is changed.
func TestStepsThatAreRefused(t *testing.T) {
	opts := testOptions(t)
	d := mustOpen(t, opts)
	want := fill(t, d)
	must(t, d.Close())
	undeclared := widened(abi.MapNames)
	undeclared.Steps[0].Maps = nil
	distant := widened()
	distant.ABI++
	limits := opts
	limits.Limits.Flows++
	limits.Version = widened(abi.MapNames)
	for name, c := range map[string]struct {
		opts store.Options
		v    *abi.Version
		says string
	}{
		"remembered flows":      {opts, widened(abi.MapRemembered), "carry sh_remembered over"},
		"a map not in the step": {opts, undeclared, "sh_names"},
		"a step missing":        {opts, distant, "cannot upgrade from there; nothing was changed"},
		"other limits":          {limits, widened(abi.MapNames), "limits.flows is 5001"},
	} {
		c.opts.Version = c.v
		if _, err := Open(c.opts); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want the words %q", name, err, c.says)
		}
		if _, err := os.Stat(opts.MapDir(2)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: something was left: %v", name, err)
		}
	}
	requireContents(t, mustOpen(t, opts), want)
}

// TestUpgradesThatAreRefused: with programs that could not be switched at once, nothing is changed.
func TestUpgradesThatAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		attach map[string]model.Attach // interfaces, and how
		says   string
	}{
		"at tc":  {map[string]model.Attach{"shunt-a": model.AttachTC}, "its programs on shunt-a are at tc, where an upgrade is not supported yet; nothing was changed"},
		"a VLAN": {map[string]model.Attach{"shunt-a": model.AttachNative, "shunt-b": model.AttachNative}, "its programs on shunt-b are in native mode at their parents, where an upgrade is not supported yet; nothing was changed"},
	} {
		t.Run(name, func(t *testing.T) {
			inNamespace(t)
			opts := testOptions(t)
			opts.VLANs = func(dev netlink.Link) (store.VLAN, bool) {
				return store.VLAN{Parent: "shunt-a", Tags: []store.Tag{{Protocol: unix.ETH_P_8021Q, ID: 7}}}, dev.Attrs().Name == "shunt-b"
			}
			d := mustOpen(t, opts)
			for _, iface := range slices.Sorted(maps.Keys(c.attach)) { // the parent first
				_, err := d.Attach(iface, c.attach[iface])
				must(t, err)
			}
			must(t, d.Close())
			newer := opts
			newer.Version = widened(abi.MapNames)
			if d, err := Open(newer); err == nil || !strings.Contains(err.Error(), c.says) {
				if err == nil {
					must(t, d.Close())
				}
				t.Fatalf("got %v, want the words %q", err, c.says)
			}
			if _, err := os.Stat(opts.MapDir(newer.Version.ABI)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("something was left of the new ABI: %v", err)
			}
			d = mustOpen(t, opts)
			for _, iface := range slices.Backward(slices.Sorted(maps.Keys(c.attach))) { // the VLAN first
				_, err := d.Attach(iface, model.AttachGeneric)
				must(t, err)
			}
			must(t, d.Close())
			mustOpen(t, newer)
		})
	}
}
