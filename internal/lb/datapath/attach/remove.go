package attach

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// Remove removes an instance from kernel.DefaultPinRoot: programs from the interfaces first, so that no packet
// meets half a data plane, then the maps, and connections with them. It needs no daemon, and succeeds if
// nothing is there. It logs the removed objects.
func Remove(instance string, log *slog.Logger) error {
	return RemoveFrom(store.Options{Instance: instance, Log: log})
}

// RemoveFrom does the same as Remove with another pin root. It ignores Limits.
func RemoveFrom(opts store.Options) error {
	if err := opts.Complete(); err != nil {
		return err
	}
	dir := kernel.Directory(opts.PinRoot, opts.Instance)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list the pins in %s: %w", dir, err)
	}
	vlans, err := store.PinnedVLANs(opts, opts.Version.ABI)
	if err != nil {
		opts.Log.Warn("cannot list the VLANs whose frames are taken at their parents; detaching the parents detaches these VLANs too", "error", err)
	}
	if err := removeDeliveries(opts); err != nil { // while sh_xdp still keeps forged marks from them
		return err
	}
	// Interfaces come before programs that only count.
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
		if !strings.HasPrefix(e.Name(), kernel.LinkPrefix) {
			continue
		}
		path := filepath.Join(dir, e.Name())
		if err := kernel.RemoveLink(path); err != nil {
			errs = append(errs, fmt.Errorf("detach the program pinned at %s: %w; the maps stay while it runs", path, err))
			continue
		}
		if name := strings.TrimPrefix(e.Name(), kernel.LinkPrefix); !isDropsLink(e.Name()) {
			opts.Log.Info("detached", "instance", opts.Instance, "interface", kernel.FromPin(name))
		}
	}
	sides, err := pinnedSides(opts.PinRoot, opts.Instance)
	if err != nil {
		return err
	}
	for _, name := range sides {
		if err := removeTC(opts, name); err != nil {
			errs = append(errs, fmt.Errorf("detach from interface %s at tc: %w; the maps are kept while it runs", name, err))
			continue
		}
		opts.Log.Info("detached", "instance", opts.Instance, "interface", name)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, t := range vlans { // the programs that took their frames are gone
		opts.Log.Info("detached", "instance", opts.Instance, "interface", kernel.InterfaceName(t.Ifindex))
	}
	for _, e := range entries {
		for _, prefix := range []string{chainPrefix, PositionBefore.pinPrefix(), PositionAfter.pinPrefix()} {
			if name, ok := strings.CutPrefix(e.Name(), prefix); ok {
				errs = append(errs, removeChain(opts.PinRoot, opts.Instance, kernel.FromPin(name)))
			}
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
	// The parent folder is removed with its last instance.
	_ = os.Remove(filepath.Dir(dir))
	return errors.Join(errs...)
}

// removeTC detaches the programs at tc that the pins name, even if the interface has moved.
func removeTC(opts store.Options, iface string) error {
	return removeSides(opts, iface, directions)
}

func removeSides(opts store.Options, iface string, sides [len(directions)]direction) error {
	var errs []error
	for _, at := range sides {
		errs = append(errs, at.side(opts.PinRoot, opts.Instance, iface, 0).DropAnywhere())
	}
	return errors.Join(errs...)
}

// Pinned lists the files in bpffs under an instance's name.
type Pinned struct {
	Path string
	// What describes the file, as in "program on eth0".
	What string
}

// Instances lists the names of the instances that have something pinned, by any version.
func Instances() ([]string, error) {
	_, _ = kernel.SharePins()
	entries, err := os.ReadDir(kernel.Home(kernel.DefaultPinRoot))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the instances: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && kernel.CheckName(e.Name()) == nil {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// PinnedOf lists the pins of an instance, without opening any of them.
func PinnedOf(instance string) ([]Pinned, error) {
	_, _ = kernel.SharePins()
	dir := kernel.Directory(kernel.DefaultPinRoot, instance)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list the pins in %s: %w", dir, err)
	}
	var all []Pinned
	for _, e := range entries {
		p := Pinned{Path: filepath.Join(dir, e.Name()), What: "pin"}
		switch name := e.Name(); {
		case e.IsDir():
			maps, err := os.ReadDir(p.Path)
			if err != nil {
				return nil, fmt.Errorf("list the pins in %s: %w", p.Path, err)
			}
			p.What = fmt.Sprintf("%d maps, with the flows in them", len(maps))
			if strings.HasPrefix(name, kernel.StampPrefix) {
				p.What = "stamps of probes"
			}
		case isDropsLink(name):
			p.What = "program that counts refused frames"
		case strings.HasPrefix(name, kernel.LinkPrefix):
			p.What = "program on " + kernel.FromPin(strings.TrimPrefix(name, kernel.LinkPrefix))
		case strings.HasPrefix(name, PositionBefore.pinPrefix()):
			p.What = "program before shunt's on " + kernel.FromPin(strings.TrimPrefix(name, PositionBefore.pinPrefix()))
		case strings.HasPrefix(name, PositionAfter.pinPrefix()):
			p.What = "program after shunt's on " + kernel.FromPin(strings.TrimPrefix(name, PositionAfter.pinPrefix()))
		case strings.HasPrefix(name, chainPrefix):
			p.What = "chain of " + kernel.FromPin(strings.TrimPrefix(name, chainPrefix))
		case strings.HasPrefix(name, deliverPrefix):
			p.What = "program at tc beside the one at XDP"
		}
		all = append(all, p)
	}
	return all, nil
}
