package packet_test

import (
	"bytes"
	"maps"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// TestSiteAgain: the next world at a site begins with the same state as the first one, and with the same
// programs, after any changes of maps; a world that leaves any other change loses its site. It is not
// parallel, so no other test's world takes a site meanwhile.
func TestSiteAgain(t *testing.T) {
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) { siteAgain(t, mode) })
	}
}

func siteAgain(t *testing.T, mode model.Attach) {
	if *hook == "vlan" {
		return // such worlds keep no sites
	}
	var first *site
	var before map[string]map[string]string
	t.Run("first", func(t *testing.T) {
		w := newWorld(t, withMode(mode), withoutHeartbeat)
		first = w.site
		before = first.dump(t)
		first.dirty(w)
	})
	if t.Failed() {
		return
	}
	must(t, first.eachMap(func(name string, m *ebpf.Map) error {
		left, err := contents(m)
		if len(left) > 0 {
			t.Errorf("%s has %d elements, want none: %x", name, len(left), slices.Sorted(maps.Keys(left))[0])
		}
		return err
	}))
	loads := len(first.loaded)
	t.Run("again", func(t *testing.T) {
		w := newWorld(t, withMode(mode), withoutHeartbeat)
		if w.site != first {
			t.Fatal("the site was not kept")
		}
		if len(first.loaded) != loads {
			t.Errorf("%d collections were loaded, want none: the same are there", len(first.loaded)-loads)
		}
		if diff := cmp.Diff(before, first.dump(t)); diff != "" {
			t.Errorf("the second world is not as the first (-first +second):\n%s", diff)
		}
		w.converse(kinds[0], 40000).say("cS", "bSA", "cA")
		w.cpu.do(func() {
			link, err := netlink.LinkByName(armA)
			must(w, err)
			must(w, netlink.LinkSetMTU(link, 1400))
		})
	})
	t.Run("another", func(t *testing.T) {
		if w := newWorld(t, withMode(mode)); w.site == first {
			t.Error("the site was kept, though an interface's MTU is another")
		}
	})
}

// dump is the contents of all maps, by name and key.
func (s *site) dump(t *testing.T) map[string]map[string]string {
	t.Helper()
	all := map[string]map[string]string{}
	must(t, s.eachMap(func(name string, m *ebpf.Map) (err error) {
		all[name], err = contents(m)
		return err
	}))
	return all
}

// dirty writes an element that is not zero into each map, at both ends of arrays.
func (s *site) dirty(w *world) {
	w.Helper()
	must(w, s.eachMap(func(name string, m *ebpf.Map) error {
		key := bytes.Repeat([]byte{0xff}, int(m.KeySize()))
		value := bytes.Repeat([]byte{0xff}, int(m.ValueSize()))
		var err error
		switch m.Type() {
		case ebpf.Array, ebpf.PerCPUArray:
			var written any = value
			if m.Type() == ebpf.PerCPUArray {
				each := zero(m).([][]byte)
				for i := range each {
					each[i] = value
				}
				written = each
			}
			if err = m.Put(uint32(0), written); err == nil {
				err = m.Put(m.MaxEntries()-1, written)
			}
		case ebpf.LPMTrie:
			copy(key, keyOf(8)) // the prefix's length
			err = m.Put(key, value)
		case ebpf.DevMap:
			copy(value[copy(value, keyOf(uint32(s.ifindex[armA]))):], make([]byte, 4))
			err = m.Put(m.MaxEntries()-1, value)
		case ebpf.ProgramArray:
			err = m.Put(m.MaxEntries()-1, s.program())
		default:
			err = m.Put(key, value)
		}
		if err != nil {
			return err
		}
		left, err := contents(m)
		if len(left) == 0 {
			w.Errorf("%s is as empty as before", name)
		}
		return err
	}))
}

// program is a program that can be in a prog array of the data plane.
func (s *site) program() *ebpf.Program {
	for _, all := range s.loaded {
		for _, name := range []string{"sh_xdp", "sh_tc"} {
			if p := all.Programs[name]; p != nil {
				return p
			}
		}
	}
	return nil
}
