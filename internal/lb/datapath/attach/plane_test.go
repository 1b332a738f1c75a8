package attach

import (
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/bed"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/test/variant"
)

var (
	must        = bed.Must
	needRoot    = bed.NeedRoot
	inNamespace = bed.Namespace
	device      = bed.Device
	quiet       = bed.Quiet
)

// testOptions returns the options of an instance of the test's own, which is removed after it.
func testOptions(t *testing.T) store.Options {
	t.Helper()
	return store.Options{Version: variant.FromEnvironment(), Limits: bed.Limits, PinRoot: kernel.DefaultPinRoot, Log: quiet(), Instance: bed.Instance(t, func(instance string) error {
		return Remove(instance, quiet())
	})}
}

func mustOpen(t *testing.T, opts store.Options) *Plane {
	t.Helper()
	must(t, opts.Complete())
	must(t, kernel.Mount(opts.PinRoot, opts.Log))
	w, err := store.Open(opts)
	must(t, err)
	d, err := New(w)
	must(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	})
	return d
}

// mapOf opens one of the maps, as another process would.
func mapOf(t *testing.T, d *Plane, name string) *ebpf.Map {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(d.opts.MapDir(d.opts.Version.ABI), name), nil)
	must(t, err)
	t.Cleanup(func() { _ = m.Close() })
	return m
}
