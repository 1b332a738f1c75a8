package datapath

import (
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
)

// mapOf opens one of the maps, as another process would.
func mapOf(t *testing.T, d *Plane, name string) *ebpf.Map {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(d.opts.MapDir(d.opts.Version.ABI), name), nil)
	must(t, err)
	t.Cleanup(func() { _ = m.Close() })
	return m
}
