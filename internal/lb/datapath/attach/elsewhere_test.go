package attach

import (
	"errors"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// rename gives an interface of the test's namespace another name.
func rename(t *testing.T, from, to string) {
	t.Helper()
	dev := device(t, from)
	must(t, netlink.LinkSetDown(dev))
	must(t, netlink.LinkSetName(dev, to))
	must(t, netlink.LinkSetUp(dev))
}

// TestAttachmentsSeenFromAnotherNamespace: an attachment has the interface's name in its own namespace,
// and an interface with the same index or the same name in the caller's namespace does not count as attached.
func TestAttachmentsSeenFromAnotherNamespace(t *testing.T) {
	needRoot(t)
	type way struct {
		name       string
		attach     model.Attach
		withoutTCX bool
		want       kernel.Mode
	}
	ways := []way{
		{"native", model.AttachNative, false, kernel.ModeNative},
		{"generic", model.AttachGeneric, false, kernel.ModeGeneric},
	}
	for _, c := range tcModes() {
		ways = append(ways, way{"tc, " + c.name, model.AttachTC, c.withoutTCX, wantedTC(c.withoutTCX)})
	}
	for _, c := range ways {
		t.Run(c.name, func(t *testing.T) {
			inNamespace(t)
			d := mustOpen(t, testOptions(t))
			d.withoutTCX = c.withoutTCX
			_, err := d.Attach("shunt-a", c.attach)
			must(t, err)
			index := device(t, "shunt-a").Attrs().Index
			home, err := netns.Get()
			must(t, err)
			defer home.Close() //nolint:errcheck // only used to enter
			requireAttachment := func(when, name string, mode kernel.Mode) {
				t.Helper()
				all, err := d.Attachments()
				must(t, err)
				if len(all) != 1 || all[0].Interface != name || all[0].Mode != mode || (mode == "") != (all[0].Reason != "") {
					t.Errorf("%s: attachments are %+v, want %s in mode %q", when, all, name, mode)
				}
			}
			requireAttachment("at home", "shunt-a", c.want)

			inNamespace(t)
			if there := device(t, "shunt-a").Attrs().Index; there != index {
				t.Fatalf("the index is %d here and %d there: the test shows nothing", index, there)
			}
			requireAttachment("where an interface has index and name", "shunt-a", "")
			rename(t, "shunt-a", "shunt-x")
			requireAttachment("where another interface has the index", "shunt-a", "")
			other := mustOpen(t, testOptions(t))
			other.withoutTCX = c.withoutTCX
			_, err = other.Attach("shunt-x", c.attach)
			must(t, err)
			requireAttachment("where it has a program of another instance", "shunt-a", "")
			rename(t, "shunt-x", "shunt-a")
			requireAttachment("and the name, too", "shunt-a", "")
			must(t, other.Detach("shunt-x"))

			away, err := netns.Get()
			must(t, err)
			defer away.Close() //nolint:errcheck // only used to enter
			must(t, netns.Set(home))
			rename(t, "shunt-a", "shunt-c")
			if c.want != kernel.ModeClsact { // its pin is not a link, and so knows the name alone
				requireAttachment("renamed at home", "shunt-c", c.want)
			}
			must(t, errors.Join(d.Detach("shunt-a"), netns.Set(away)))
			if all := d.Attached(); slices.Contains(all, "shunt-a") {
				t.Errorf("after detaching, attached to %v", all)
			}
		})
	}
}
