package daemon

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/safchain/ethtool"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/namespace/nstest"
)

// offloadBench has one end of a veth pair, here, with the mode and role that a test chooses; the other end is
// there.
type offloadBench struct {
	*testing.T
	offloads
	here, there *nstest.Namespace
}

func newOffloadBench(t *testing.T, there func(here *nstest.Namespace) *nstest.Namespace) *offloadBench {
	b := &offloadBench{T: t, here: nstest.New(t),
		offloads: offloads{filepath.Join(t.TempDir(), "offloads"), &condition.Set{}, slog.New(slog.DiscardHandler), filepath.Join(t.TempDir(), "vlans")}}
	b.there = there(b.here)
	nstest.Veth(t, b.here, "lan", b.there, "eth")
	b.Log("features before:", b.on())
	return b
}

func sameHost(here *nstest.Namespace) *nstest.Namespace { return here }

// on returns the features of merging and of tags that are on, here and there.
func (b *offloadBench) on() (names string) {
	b.Helper()
	for _, end := range []struct {
		*nstest.Namespace
		device   string
		features []string
	}{{b.here, "lan", []string{"rx-gro", "rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"}},
		{b.there, "eth", []string{"tx-tcp-segmentation", "tx-vlan-hw-insert", "tx-vlan-stag-hw-insert"}}} {
		end.Do(b.T, func() {
			tool, err := ethtool.NewEthtool()
			if err != nil {
				b.Fatal(err)
			}
			defer tool.Close()
			have, err := tool.Features(end.device)
			if err != nil {
				b.Fatal(err)
			}
			for _, name := range end.features {
				if have[name] {
					names += " " + name
				}
			}
		})
	}
	return strings.TrimSpace(names)
}

func (b *offloadBench) do(what func() error) {
	b.Helper()
	var err error
	b.here.Do(b.T, func() { err = what() })
	if err != nil {
		b.Fatal(err)
	}
}

// becomes fits the interface to a mode and a role, and compares the features that are on then, and the conditions.
func (b *offloadBench) becomes(mode kernel.Mode, parent bool, on string, conditions ...string) {
	b.Helper()
	b.do(func() error { return b.fit("lan", mode, parent) })
	if have := b.on(); have != on {
		b.Errorf("%s, parent %v: on are %q, want %q", mode, parent, have, on)
	}
	var codes []string
	for _, c := range b.conditions.List() {
		codes = append(codes, c.Code)
	}
	slices.Sort(codes)
	if !slices.Equal(codes, conditions) {
		b.Errorf("%s, parent %v: conditions %q, want %q", mode, parent, codes, conditions)
	}
}

const (
	rxMerging, txMerging = "rx-gro", "tx-tcp-segmentation"
	rxTags, txTags       = "rx-vlan-hw-parse rx-vlan-stag-hw-parse", "tx-vlan-hw-insert tx-vlan-stag-hw-insert"
)

// TestOffloadsFitTheMode: the offloads that generic mode or a VLAN's parent cannot have are switched off while
// there is one, each by itself, and a successor knows of both.
func TestOffloadsFitTheMode(t *testing.T) {
	b := newOffloadBench(t, sameHost)
	before := b.on()
	if !strings.Contains(before, rxTags) || !strings.Contains(before, txTags) || !strings.Contains(before, txMerging) {
		t.Fatalf("before the test on are %q", before)
	}
	merging, tags := condition.AggregationSwitchedOff, condition.TagOffloadSwitchedOff
	words := func(names ...string) string {
		return strings.Join(slices.DeleteFunc(names, func(n string) bool { return !strings.Contains(before, n) }), " ")
	}
	withoutTags, withoutMerging := words(rxMerging, txMerging), words(rxTags, txTags)
	b.becomes(kernel.ModeNative, false, before)
	b.becomes(kernel.ModeNative, true, withoutTags, tags)
	if c := b.conditions.List()[0]; c.Subject != "lan" || !strings.Contains(c.Text, "lan: rx-vlan-hw-parse, rx-vlan-stag-hw-parse, the other end of lan: tx-vlan-hw-insert, tx-vlan-stag-hw-insert") {
		t.Errorf("the condition is %+v", c)
	}
	b.becomes(kernel.ModeNative, true, withoutTags, tags)
	b.becomes(kernel.ModeGeneric, true, "", merging, tags)
	b.offloads.conditions = &condition.Set{} // of the next process
	b.becomes(kernel.ModeGeneric, false, withoutMerging, merging)
	b.becomes(kernel.ModeNative, true, withoutTags, tags)
	b.becomes(kernel.ModeGeneric, true, "", merging, tags)
	b.do(func() error { return b.release("lan") })
	b.becomes(kernel.ModeNative, false, before)
	if _, err := os.Stat(b.path); !os.IsNotExist(err) {
		t.Errorf("something is still written down: %v", err)
	}
}

// TestOtherEndThatHidesTags: if the other end of a veth cannot be reached, the operator is told the command
// to run.
func TestOtherEndThatHidesTags(t *testing.T) {
	b := newOffloadBench(t, func(*nstest.Namespace) *nstest.Namespace { return nstest.New(t) }) // without a name, and no process in it
	b.do(func() error { return b.fit("lan", kernel.ModeNative, true) })
	if on := b.on(); strings.Contains(on, rxTags) || !strings.Contains(on, txTags) {
		t.Errorf("on are %q", on)
	}
	list := b.conditions.List()
	at := slices.IndexFunc(list, func(c condition.Condition) bool { return c.Code == condition.PeerHidesTags })
	if at < 0 || !strings.Contains(list[at].Text, "VLAN tags beside frames") || !strings.Contains(list[at].Remedy, "tx-vlan-hw-insert off tx-vlan-stag-hw-insert off") {
		t.Errorf("the conditions are %+v", list)
	}
	b.do(func() error { return b.fit("lan", kernel.ModeNative, false) })
	if list := b.conditions.List(); len(list) > 0 {
		t.Errorf("without VLANs there are %+v", list)
	}
}

// TestHiddenTagsAreNamed: an interface in an XDP mode has VLANs, and their tags come beside the frames.
func TestHiddenTagsAreNamed(t *testing.T) {
	b := newOffloadBench(t, sameHost)
	says := func(mode kernel.Mode, parent bool, parts ...string) {
		t.Helper()
		b.do(func() error { return b.warn("lan", mode, parent) })
		list := b.conditions.List()
		if len(parts) == 0 {
			if len(list) > 0 {
				t.Errorf("%s, parent %v: %+v", mode, parent, list)
			}
			return
		}
		if len(list) != 1 || list[0].Code != condition.TagsHidden || list[0].Subject != "lan" ||
			slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(list[0].Text, p) }) {
			t.Errorf("%s, parent %v: %+v, want one with %q", mode, parent, list, parts)
		}
	}
	says(kernel.ModeNative, false) // a kernel without VLANs
	write := func(lines string) {
		t.Helper()
		if err := os.WriteFile(b.vlans, []byte("VLAN Dev name\t | VLAN ID\nName-Type: VLAN_NAME_TYPE_RAW_PLUS_VID_NO_PAD\n"+lines), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("wan.5          | 5  | wan\n")
	says(kernel.ModeNative, false)
	write("wan.5          | 5  | wan\nlan.100        | 100  | lan\nlan.7          | 7  | lan\nlan.7.1        | 1  | lan.7\n")
	all := []string{"frames of lan.100, lan.7 without", "lan: rx-vlan-hw-parse, rx-vlan-stag-hw-parse; the other end of lan: tx-vlan-hw-insert, tx-vlan-stag-hw-insert"}
	says(kernel.ModeNative, false, all...)
	says(kernel.ModeNative, true)
	says(kernel.ModeGeneric, false, all...)
	says(kernel.ModeTCX, false)
	b.do(func() error { return b.fit("lan", kernel.ModeNative, true) })
	b.conditions.Clear(condition.TagOffloadSwitchedOff, "lan")
	says(kernel.ModeNative, false) // another program has switched it off
	b.do(func() error { return b.release("lan") })
	says(kernel.ModeNative, false, all...)
	b.do(func() error { return b.release("lan") })
	if list := b.conditions.List(); len(list) > 0 {
		t.Errorf("without shunt there are %+v", list)
	}
}
