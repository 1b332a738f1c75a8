package attach

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// meter is a miniature of another product: it counts the packets of an interface, in a map of its own
// ABI, and outlives its process as a balancer does.
type meter struct {
	program *ebpf.Program
	link    link.Link
	seen    *ebpf.Map
}

const meterMap = "mt_seen"

// meterVersion is a version of the meter: its ABI, the bytes of a value of its map, and its program.
type meterVersion struct {
	abi       uint32
	valueSize uint32
	program   asm.Instructions
}

// counting is a program that adds one to the first value.
var counting = asm.Instructions{
	asm.StoreImm(asm.R10, -4, 0, asm.Word),
	asm.Mov.Reg(asm.R2, asm.R10),
	asm.Add.Imm(asm.R2, -4),
	asm.LoadMapPtr(asm.R1, 0).WithReference(meterMap),
	asm.FnMapLookupElem.Call(),
	asm.JEq.Imm(asm.R0, 0, "pass"),
	asm.Mov.Imm(asm.R1, 1),
	asm.AddAtomic.Mem(asm.R0, asm.R1, asm.DWord, 0),
	asm.Mov.Imm(asm.R0, int32(kernel.XDPPass)).WithSymbol("pass"),
	asm.Return(),
}

// refused is a program without a verdict.
var refused = asm.Instructions{asm.Return()}

// openMeter starts a version of the meter as a product does, with package kernel alone.
func openMeter(name, iface string, v meterVersion, limit uint32) (m *meter, err error) {
	spec := &ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{meterMap: {Name: meterMap, Type: ebpf.Array, KeySize: 4, ValueSize: v.valueSize, MaxEntries: 1}},
		Programs: map[string]*ebpf.ProgramSpec{"mt_count": {
			Name: "mt_count", Type: ebpf.XDP, License: "MIT", Instructions: slices.Clone(v.program),
		}},
	}
	sizes := map[string]kernel.Size{meterMap: {Count: limit, Limit: "meter.interfaces", Given: limit, Per: 1}}
	set, err := kernel.NewMapSet(spec, kernel.MapDirectory(kernel.DefaultPinRoot, name, v.abi), sizes, "stop the meter")
	if err != nil {
		return nil, err
	}
	own, adopted, err := set.Open()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil && !adopted {
			err = errors.Join(err, set.Remove())
		}
	}()
	coll, err := kernel.Load(spec, nil, own)
	if err != nil {
		return nil, errors.Join(err, own[meterMap].Close())
	}
	defer coll.Close()
	m = &meter{seen: own[meterMap]}
	if m.program, err = kernel.TakeProgram(coll, "mt_count"); err != nil {
		return nil, err
	}
	path := filepath.Join(kernel.Directory(kernel.DefaultPinRoot, name), kernel.LinkPrefix+kernel.ToPin(iface))
	if m.link, err = link.LoadPinnedLink(path, nil); err == nil {
		return m, m.link.Update(m.program)
	}
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return nil, err
	}
	if m.link, err = kernel.AttachXDP(m.program, iface, dev.Attrs().Index, kernel.ModeGeneric, ""); err != nil {
		return nil, err
	}
	return m, m.link.Pin(path)
}

func (m *meter) close() error {
	return errors.Join(m.link.Close(), m.program.Close(), m.seen.Close())
}

// TestAnotherProductBeside shows that a product with an ABI of its own runs beside a balancer, that a
// version of it which the kernel refuses leaves both as they were, and that the end of one does not end
// the other.
func TestAnotherProductBeside(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	putWeb(t, d)
	port := 40000
	balances := func(when string) {
		t.Helper()
		port++
		verdict, _, err := d.RunPacket("shunt-a", webSYN(t, fmt.Sprintf("198.51.100.7:%d", port), 80))
		must(t, err)
		if verdict != kernel.XDPRedirect {
			t.Errorf("%s: a packet to the service has the verdict %d, want %d", when, verdict, kernel.XDPRedirect)
		}
	}
	balances("alone")

	name := fmt.Sprintf("_meter-%d", os.Getpid())
	home := kernel.Directory(kernel.DefaultPinRoot, name)
	t.Cleanup(func() { must(t, os.RemoveAll(home)) })
	first := meterVersion{abi: 1, valueSize: 8, program: counting}
	m, err := openMeter(name, "shunt-b", first, 1)
	must(t, err)
	counted := uint64(0)
	counts := func(when string) {
		t.Helper()
		_, _, err := kernel.RunXDP(m.program, "shunt-b", device(t, "shunt-b").Attrs().Index, webSYN(t, "198.51.100.7:1", 80))
		must(t, err)
		var have uint64
		must(t, m.seen.Lookup(uint32(0), &have))
		if counted++; have < counted {
			t.Errorf("%s: the meter counts %d packets, want %d at least", when, have, counted)
		}
	}
	counts("beside the balancer")
	balances("beside the meter")

	for words, broken := range map[string]func() (*meter, error){
		"the kernel's verifier refused a program": func() (*meter, error) {
			return openMeter(name, "shunt-b", meterVersion{abi: 2, valueSize: 16, program: refused}, 1)
		},
		"make map mt_seen": func() (*meter, error) {
			return openMeter(name, "shunt-b", meterVersion{abi: 2, valueSize: 0, program: counting}, 1)
		},
		"meter.interfaces is 2, but the loaded data plane was made for 1: stop the meter or set it back": func() (*meter, error) {
			return openMeter(name, "shunt-b", first, 2)
		},
	} {
		if _, err := broken(); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("got %v, want %q", err, words)
		}
		abis, err := kernel.PinnedABIs(kernel.DefaultPinRoot, name)
		must(t, err)
		if !slices.Equal(abis, []uint32{1}) {
			t.Errorf("%s: the meter has maps of the ABIs %d, want 1 alone", words, abis)
		}
		counts(words)
		balances(words)
	}

	must(t, m.close())
	m, err = openMeter(name, "shunt-b", first, 1)
	must(t, err)
	counts("adopted")

	instances, err := Instances()
	must(t, err)
	if slices.Contains(instances, name) || !slices.Contains(instances, opts.Instance) {
		t.Errorf("the instances are %q: the balancer's is %s, and the meter is none", instances, opts.Instance)
	}
	must(t, RemoveFrom(opts))
	counts("the balancer has gone")
	must(t, kernel.RemoveLink(filepath.Join(home, kernel.LinkPrefix+"shunt-b")))
	must(t, m.close())
}
