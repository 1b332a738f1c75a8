package daemon

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// interfaceBench has interfaces with a data plane that attaches only where a test lets it.
type interfaceBench struct {
	*testing.T
	*interfaces
	done     []string               // since the last did
	there    map[string]int         // indices of the interfaces that exist
	programs map[string]int         // index of the interface that each is attached to
	modes    map[string]kernel.Mode // modes after attaching; native if there is none
	refused  map[string]error       // by name
	told     int                    // number of reports that the result of hopToHost may have changed
	stuck    map[string]error       // offloads cannot be switched off
	tags     map[string]bool        // of interfaces that leave tags in the frame
	warned   map[string]string      // requests about their tags
}

func newInterfaceBench(t *testing.T, there ...string) *interfaceBench {
	b := &interfaceBench{T: t, there: map[string]int{}, programs: map[string]int{}, modes: map[string]kernel.Mode{},
		refused: map[string]error{}, stuck: map[string]error{}, tags: map[string]bool{}, warned: map[string]string{}}
	for i, name := range there {
		b.there[name] = i + 1
	}
	b.interfaces = newInterfaces(attachments{b}, b, &condition.Set{}, slog.New(slog.DiscardHandler), func() { b.told++ })
	b.find = func(name string) (*net.Interface, error) {
		if b.there[name] == 0 {
			return nil, errors.New("no such interface")
		}
		return &net.Interface{Index: b.there[name], Name: name, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, byte(b.there[name])}}, nil
	}
	return b
}

// attachments is the bench as the data plane.
type attachments struct{ *interfaceBench }

func (a attachments) Attach(name string, mode model.Attach) (kernel.Attachment, error) {
	if err := a.refused[name]; err != nil {
		return kernel.Attachment{}, err
	}
	a.done = append(a.done, fmt.Sprintf("attach %s %s", name, mode))
	a.programs[name] = a.there[name]
	attachment := kernel.Attachment{Interface: name, Mode: kernel.ModeNative}
	if got, ok := a.modes[name]; ok {
		attachment.Mode, attachment.Reason = got, "the driver has none"
	}
	return attachment, nil
}

func (a attachments) Detach(name string) error {
	a.done = append(a.done, "detach "+name)
	delete(a.programs, name)
	return nil
}

func (a attachments) RefreshInterface(name string) error {
	if a.programs[name] != a.there[name] {
		return errors.New("not attached to it")
	}
	return nil
}

func (a attachments) Attached() []string { return slices.Sorted(maps.Keys(a.programs)) }

// Parent is "a" for "a.7", as long as that exists.
func (a attachments) Parent(name string) string {
	parent, _, tagged := strings.Cut(name, ".")
	if !tagged || a.there[name] == 0 {
		return ""
	}
	return parent
}

func (a attachments) DropGoneVLANs() error { return nil }

func (a attachments) AttachPod(name string) (kernel.Attachment, error) {
	return a.Attach(name, "of a pod")
}

func (a attachments) ExpectPods(are bool) error {
	a.done = append(a.done, fmt.Sprintf("expect pods: %v", are))
	return a.refused["pods"]
}

func (b *interfaceBench) fit(name string, _ kernel.Mode, parent bool) error {
	if b.stuck[name] == nil && b.tags[name] != parent {
		b.done = append(b.done, fmt.Sprintf("tags in frames of %s: %v", name, parent))
		b.tags[name] = parent
	}
	return b.stuck[name]
}

func (b *interfaceBench) warn(name string, mode kernel.Mode, parent bool) error {
	b.warned[name] = fmt.Sprintf("%s, parent: %v", mode, parent)
	return nil
}

func (b *interfaceBench) release(name string) error {
	delete(b.tags, name)
	b.done = append(b.done, "release "+name)
	return nil
}

// did compares the actions since its last call.
func (b *interfaceBench) did(want ...string) {
	b.Helper()
	if !slices.Equal(b.done, want) {
		b.Errorf("done: %q\nwant: %q", b.done, want)
	}
	b.done = nil
}

// holds compares the conditions that hold, "code subject" each.
func (b *interfaceBench) holds(want ...string) {
	b.Helper()
	var have []string
	for _, c := range b.conditions.List() {
		have = append(have, c.Code+" "+c.Subject)
	}
	slices.Sort(have)
	if !slices.Equal(have, want) {
		b.Errorf("conditions %q, want %q", have, want)
	}
}

// listed returns interfaces as the configuration has them: a name, or "name:mode".
func listed(names ...string) (all []model.Interface) {
	for _, name := range names {
		name, mode, said := strings.Cut(name, ":")
		i := model.Interface{Name: name, Attach: model.AttachAuto}
		if said {
			i.Attach = model.Attach(mode)
		}
		all = append(all, i)
	}
	return all
}

// TestAttachAll: an attachment in force stays untouched, another mode is attached anew, and an interface that
// refuses leaves the attachments that were in force, and no others.
func TestAttachAll(t *testing.T) {
	b := newInterfaceBench(t, "a", "b", "c")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(b.attachAll(nil, listed("a", "b")))
	b.did("attach a auto", "attach b auto")
	must(b.attachAll(listed("a", "b"), listed("a", "b:generic", "c")))
	b.did("attach b generic", "attach c auto")
	must(b.detachOthers(listed("a", "c")))
	b.did("detach b", "release b")
	if names := b.names(); !slices.Equal(names, []string{"a", "c"}) {
		t.Errorf("attached to %q", names)
	}

	b.refused["b"] = errors.New("out of order")
	if err := b.attachAll(listed("a"), listed("c", "b")); !errors.Is(err, b.refused["b"]) {
		t.Errorf("b refused, and the error is %v", err)
	}
	b.did("attach c auto", "detach c", "release c")

	// At a start nothing is in force, and the attachments are a predecessor's.
	b = newInterfaceBench(t, "a", "b")
	b.programs["a"], b.refused["b"] = 1, errors.New("out of order")
	if err := b.attachAll(nil, listed("a", "b")); !errors.Is(err, b.refused["b"]) {
		t.Errorf("b refused, and the error is %v", err)
	}
	b.did("attach a auto")
}

// TestAttachedWithoutMerging: in generic mode merging must be off, or nothing stays attached. Generic mode
// is a condition if the driver left no other mode, unless the configuration asked for it.
func TestAttachedWithoutMerging(t *testing.T) {
	b := newInterfaceBench(t, "a", "b")
	b.modes["a"], b.modes["b"] = kernel.ModeGeneric, kernel.ModeGeneric
	if err := b.attachAll(nil, listed("a", "b:generic")); err != nil {
		t.Fatal(err)
	}
	b.holds(condition.AttachDegraded + " a")
	if reason := b.list()[0].Reason; reason != "the driver has none" {
		t.Errorf("the reason is %q", reason)
	}
	if err := b.detachOthers(nil); err != nil {
		t.Fatal(err)
	}
	b.holds()
	b.done = nil
	b.stuck["a"] = errors.New("merging is fixed on")
	if err := b.attachAll(nil, listed("a")); !errors.Is(err, b.stuck["a"]) {
		t.Errorf("merging stays on, and the error is %v", err)
	}
	b.did("attach a auto", "detach a", "release a")
	b.holds()
}

// TestDetachWhatAPredecessorLeft: a daemon before this one may have had other interfaces.
func TestDetachWhatAPredecessorLeft(t *testing.T) {
	b := newInterfaceBench(t, "a", "old")
	b.programs["old"] = 2
	if err := errors.Join(b.attachAll(nil, listed("a")), b.detachOthers(listed("a"))); err != nil {
		t.Fatal(err)
	}
	b.did("attach a auto", "detach old", "release old")
}

// TestVLANsAndTheirParent: in any order of the list, a VLAN comes after its parent, and a parent leaves tags in its
// frames as long as there is a VLAN in native mode.
func TestVLANsAndTheirParent(t *testing.T) {
	b := newInterfaceBench(t, "a", "a.7", "a.8")
	var inForce []model.Interface
	become := func(names ...string) {
		t.Helper()
		wanted := listed(names...)
		if err := errors.Join(b.attachAll(inForce, wanted), b.detachOthers(wanted)); err != nil {
			t.Fatal(err)
		}
		inForce = wanted
	}
	become("a.7:native", "a:native")
	b.did("attach a native", "tags in frames of a: true", "attach a.7 native")
	become("a.8:native", "a.7:native", "a:auto")
	b.did("attach a auto", "attach a.8 native")
	become("a:auto", "a.8:native", "a.7:tc")
	b.did("attach a.7 tc")
	become("a:generic", "a.7:tc", "a.8:generic")
	b.did("attach a.8 generic", "attach a generic", "tags in frames of a: false")
	become("a.8:generic", "a:native")
	b.did("attach a native", "detach a.7", "release a.7")
	become("a.8:native", "a:native")
	b.did("tags in frames of a: true", "attach a.8 native")
	b.holds()

	// A VLAN is away while the list changes, and comes back.
	delete(b.there, "a.8")
	b.refresh(inForce)
	become("a:native", "a.8:native")
	b.did("tags in frames of a: false")
	b.there["a.8"] = 9
	b.refresh(inForce)
	b.did("tags in frames of a: true", "attach a.8 native")
	b.there["a"] = 10
	b.refresh(inForce)
	b.did("attach a native")
	if !b.tags["a"] {
		t.Error("the parent was made anew, and does not leave tags in its frames")
	}
	if want := map[string]string{"a": "native, parent: true", "a.8": "native, parent: false"}; !maps.Equal(b.warned, want) {
		t.Errorf("asked of hidden tags was %v, want %v", b.warned, want)
	}
	become()
	b.did("detach a.8", "release a.8", "detach a", "release a")
	b.holds()
}

// TestVLANWithoutItsParent: an impossible configuration is refused before anything is changed, or leaves nothing.
func TestVLANWithoutItsParent(t *testing.T) {
	b := newInterfaceBench(t, "a", "b", "a.7")
	for _, list := range [][]string{{"a.7:native"}, {"b", "a.7:native"}, {"a:generic", "a.7:native"}, {"a:tc", "a.7:native"}} {
		err := b.attachAll(nil, listed(list...))
		if err == nil || !strings.Contains(err.Error(), "interface a.7 in native mode: it is a VLAN of a, and native mode takes its frames there; list a among the interfaces as well, with `attach: native`") {
			t.Errorf("%q: %v", list, err)
		}
		b.did()
	}
	if err := b.attachAll(nil, listed("a:native")); err != nil {
		t.Fatal(err)
	}
	b.done = nil
	b.refused["a.7"] = errors.New("out of order")
	if err := b.attachAll(listed("a:native"), listed("a:native", "a.7:native")); !errors.Is(err, b.refused["a.7"]) {
		t.Errorf("a.7 refused, and the error is %v", err)
	}
	b.did("tags in frames of a: true", "tags in frames of a: false")
	delete(b.refused, "a.7")
	b.stuck["a"] = errors.New("tags are fixed")
	if err := b.attachAll(listed("a:native"), listed("a:native", "a.7:native")); !errors.Is(err, b.stuck["a"]) {
		t.Errorf("the parent keeps its tags, and the error is %v", err)
	}
	b.did()

	// The kernel has no native mode for the VLAN itself, which `attach: auto` says.
	b.modes["a.7"] = kernel.ModeGeneric
	if err := b.attachAll(listed("a:native"), listed("a:native", "a.7")); err != nil {
		t.Fatal(err)
	}
	b.holds(condition.AttachDegraded + " a.7")
	if c := b.conditions.List()[0]; !strings.Contains(c.Remedy, "list a among the interfaces as well, and give both `attach: native`") {
		t.Errorf("the condition is %+v", c)
	}
}

// TestInterfacesComeAndGo: a missing interface is a condition; an interface that came back is attached to.
func TestInterfacesComeAndGo(t *testing.T) {
	b := newInterfaceBench(t, "a", "b")
	inForce := listed("a", "b:native")
	if err := b.attachAll(nil, inForce); err != nil {
		t.Fatal(err)
	}
	b.done = nil
	refresh := func(anew bool, want ...string) {
		t.Helper()
		if got := b.refresh(inForce); got != anew {
			t.Errorf("anew is %v, want %v", got, anew)
		}
		b.did(want...)
	}
	refresh(false)
	b.holds()
	delete(b.there, "b")
	refresh(false)
	b.holds(condition.InterfaceMissing + " b")
	b.there["b"], b.refused["b"] = 9, errors.New("out of order")
	refresh(false)
	b.holds(condition.AttachFailed + " b")
	delete(b.there, "b")
	refresh(false)
	b.holds(condition.InterfaceMissing + " b")
	b.there["b"] = 10
	delete(b.refused, "b")
	refresh(true, "attach b native")
	b.holds()
	refresh(false)
}

// TestWayToHost: packets for this host's own backends are best brought in by an interface that sees their answers.
func TestWayToHost(t *testing.T) {
	b := newInterfaceBench(t, "a", "b", "c", "d")
	b.modes["c"], b.modes["d"] = kernel.ModeTCX, kernel.ModeClsact
	way := func(index int, ok bool) {
		t.Helper()
		got, mac, met := b.hopToHost()
		if got != index || met != ok || (index > 0) != (len(mac) == 6) || index > 0 && int(mac[5]) != index {
			t.Errorf("the way to the host is %d, %s, met %v; want %d, met %v", got, mac, met, index, ok)
		}
	}
	way(0, false)
	if err := b.attachAll(nil, listed("a", "b", "c:tc", "d:tc")); err != nil {
		t.Fatal(err)
	}
	way(3, true)
	if b.told != 4 {
		t.Errorf("told %d times that it may say something else, want once for each interface", b.told)
	}
	if err := b.detachOthers(listed("a", "b", "c")); err != nil || b.told != 5 {
		t.Errorf("after detaching from one, told %d times: %v", b.told, err)
	}
	if err := b.attachAll(listed("a", "b", "c"), listed("a", "b", "c", "d:tc")); err != nil {
		t.Fatal(err)
	}
	delete(b.there, "c")
	way(4, true)
	delete(b.there, "d")
	way(1, false)
	delete(b.there, "a")
	way(2, false)
	delete(b.there, "b")
	way(0, false)
}
