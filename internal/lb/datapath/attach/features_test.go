package attach

import (
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
)

// loadedSize returns the bytes of instructions of the interface's program.
func loadedSize(t *testing.T, iface string) int {
	t.Helper()
	info, err := running(t, iface).Info()
	must(t, err)
	size, err := info.TranslatedSize()
	must(t, err)
	return size
}

// TestFeaturesAreLoadedWhenNeeded: the first service that needs a feature has the program replaced,
// and a start leaves out features that no service needs any more.
func TestFeaturesAreLoadedWhenNeeded(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	plain := loadedSize(t, "shunt-a")
	service := reconcile.ServiceRecord{Index: 0, Generation: 1, Name: "web", Forwarding: model.ForwardingNAT, Size: 4}
	must(t, d.PutService(service))
	before := programID(t, "shunt-a")
	service.Policy.HashAddresses = true
	must(t, d.PutService(service))
	if programID(t, "shunt-a") == before || loadedSize(t, "shunt-a") <= plain {
		t.Errorf("with the hash of addresses the program has %d bytes, %d without", loadedSize(t, "shunt-a"), plain)
	}
	service.Policy.HashAddresses = false
	before = programID(t, "shunt-a")
	service.AffinityTimeout = time.Hour
	must(t, d.PutService(service))
	if size := loadedSize(t, "shunt-a"); programID(t, "shunt-a") == before || size <= plain {
		t.Errorf("with affinity the program has %d bytes, %d without", size, plain)
	}
	must(t, d.Close()) // a start leaves out the feature that hashed addresses
	d = mustOpen(t, opts)
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	remembering, link := loadedSize(t, "shunt-a"), d.attached["shunt-a"].link
	service.Forwarding = model.ForwardingDSRIPIP
	must(t, d.PutService(service))
	all, before := loadedSize(t, "shunt-a"), programID(t, "shunt-a")
	if all <= remembering {
		t.Errorf("with direct return the program has %d bytes, %d without", all, remembering)
	}
	must(t, d.PutService(service))
	if programID(t, "shunt-a") != before || d.attached["shunt-a"].link != link {
		t.Error("the program was replaced though nothing more was needed, or its link was")
	}
	if verdict, _, err := d.RunPacket("shunt-a", frame(t, "shunt-a")); err != nil || verdict != kernel.XDPPass {
		t.Errorf("a frame that is not ours: verdict %d: %v", verdict, err)
	}
	for _, c := range []struct {
		forwarding model.Forwarding
		affinity   time.Duration
		size       int
	}{{service.Forwarding, time.Hour, all}, {model.ForwardingNAT, time.Hour, remembering}, {model.ForwardingNAT, 0, plain}} {
		service.Forwarding, service.AffinityTimeout = c.forwarding, c.affinity
		must(t, d.PutService(service))
		must(t, d.Close())
		d = mustOpen(t, opts)
		_, err = d.Attach("shunt-a", model.AttachAuto)
		must(t, err)
		if size := loadedSize(t, "shunt-a"); size != c.size {
			t.Errorf("after a start with %s and affinity %s the program has %d bytes, want %d", c.forwarding, c.affinity, size, c.size)
		}
	}
}

// TestFeatureThatCannotBeLoaded: the service is refused before it is written.
func TestFeatureThatCannotBeLoaded(t *testing.T) {
	inNamespace(t)
	d := mustOpen(t, testOptions(t))
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	must(t, d.attached["shunt-a"].link.Close()) // then it takes no program
	service := reconcile.ServiceRecord{Index: 0, Generation: 1, Name: "web", Forwarding: model.ForwardingDSRL2, Size: 4}
	for range 2 { // and the second try does not think that all is well
		if err := d.PutService(service); err == nil {
			t.Fatal("a service was taken whose program could not be loaded")
		}
	}
	contents, err := d.Contents()
	must(t, err)
	if len(contents.Services) > 0 {
		t.Error("the service was written all the same")
	}
}
