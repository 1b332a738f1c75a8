package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf/link"
)

// Remove takes an instance away from DefaultPinRoot: programs off the interfaces first,
// so that no packet meets half a data plane, then the maps, and connections with them.
// It needs no daemon, and succeeds when nothing is there. It logs what it removed.
func Remove(instance string, log *slog.Logger) error {
	return RemoveFrom(Options{Instance: instance, Log: log})
}

// RemoveFrom is Remove with another pin root. Limits are not looked at.
func RemoveFrom(opts Options) error {
	if err := opts.complete(); err != nil {
		return err
	}
	dir := instanceDir(opts.PinRoot, opts.Instance)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list what is pinned in %s: %w", dir, err)
	}
	// Interfaces before what only counts.
	slices.SortStableFunc(entries, func(a, b os.DirEntry) int {
		if isDropsLink(a.Name()) != isDropsLink(b.Name()) {
			if isDropsLink(b.Name()) {
				return -1
			}
			return 1
		}
		return 0
	})
	var errs []error
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), linkPrefix) {
			continue
		}
		path := filepath.Join(dir, e.Name())
		if err := removeLink(path); err != nil {
			errs = append(errs, fmt.Errorf("detach what is pinned at %s: %w; the maps are kept while it runs", path, err))
			continue
		}
		if name := strings.TrimPrefix(e.Name(), linkPrefix); !isDropsLink(e.Name()) {
			opts.Log.Info("detached", "instance", opts.Instance, "interface", fromPin.Replace(name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, e := range entries {
		if name, ok := strings.CutPrefix(e.Name(), chainPrefix); ok {
			errs = append(errs, removeChain(opts.PinRoot, opts.Instance, fromPin.Replace(name)))
		}
		if !e.IsDir() {
			continue
		}
		path := filepath.Join(dir, e.Name())
		if err := os.RemoveAll(path); err != nil {
			errs = append(errs, fmt.Errorf("remove the maps in %s: %w", path, err))
			continue
		}
		opts.Log.Info("removed maps", "instance", opts.Instance, "path", path)
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, fmt.Errorf("remove %s: %w", dir, err))
	}
	// The parent goes with its last instance.
	_ = os.Remove(filepath.Dir(dir))
	return errors.Join(errs...)
}

// removeLink ends the link pinned at path at once; if it cannot be opened, its pin.
func removeLink(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return os.Remove(path)
	}
	return dropLink(l)
}
