package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// Pins of a guest that is kept, in its folder: one of the two at a time.
const (
	guestLinkPin = "link"   // of the program on the interface
	guestHookPin = "behind" // the map by which the host's programs call it
)

// TakenOverReason is the reason of an Attachment if an earlier process had the program in generic mode.
const TakenOverReason = "an earlier process had it in generic mode, and native mode was not tried again"

// Keep lets the guest outlive this process from now on, until Forget or Close. folder, on bpffs, must exist and
// belongs to the guest; a process that enters with it takes the guest over. Other files in it are the caller's.
func (g *Guest) Keep(folder string) error {
	g.hook.mu.Lock()
	defer g.hook.mu.Unlock()
	g.pins = folder
	if err := g.pin(); err != nil {
		return errors.Join(err, g.unpin())
	}
	return nil
}

// Forget lets the guest end with the process again.
func (g *Guest) Forget() error {
	g.hook.mu.Lock()
	defer g.hook.mu.Unlock()
	return g.unpin()
}

// Leave ends the process's part of a guest that is kept, instead of Close: the program continues to run.
func (g *Guest) Leave() error {
	defer g.hook.leave()
	g.hook.mu.Lock()
	defer g.hook.mu.Unlock()
	g.hook.guest = nil
	if g.link == nil {
		return nil
	}
	return g.link.Close()
}

// pin pins the present link or array of the program, if the guest is kept.
func (g *Guest) pin() error {
	if g.pins == "" {
		return nil
	}
	var err error
	if g.link != nil {
		err = g.link.Pin(filepath.Join(g.pins, guestLinkPin))
	}
	if path := filepath.Join(g.pins, guestHookPin); err == nil && g.behind && !g.hook.array.IsPinned() {
		if err = os.Remove(path); err == nil || errors.Is(err, fs.ErrNotExist) { // the pin may be an earlier process's
			err = g.hook.array.Pin(path)
		}
	}
	if err != nil {
		return fmt.Errorf("keep the program of interface %s in %s: %w", g.iface, g.pins, err)
	}
	return nil
}

func (g *Guest) unpin() error {
	var err error
	if g.link != nil {
		err = g.link.Unpin()
	}
	err = errors.Join(err, g.unpinHook())
	g.pins = ""
	return err
}

// unpinHook removes the pin of this process's hook, or of a hook that an earlier process has left.
func (g *Guest) unpinHook() error {
	if g.pins == "" {
		return nil
	}
	err := g.hook.array.Unpin()
	if removed := os.Remove(filepath.Join(g.pins, guestHookPin)); removed != nil && !errors.Is(removed, fs.ErrNotExist) {
		err = errors.Join(err, removed)
	}
	return err
}

// takeOver puts the program into the link that an earlier process has kept. It returns false if there is no
// link that fits; a link that does not fit has then been removed.
func (g *Guest) takeOver() (bool, error) {
	if g.pins == "" {
		return false, nil
	}
	path := filepath.Join(g.pins, guestLinkPin)
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open the link pinned at %s: %w; remove the file, which detaches it", path, err)
	}
	dev, err := netlink.LinkByIndex(g.ifindex)
	if err != nil {
		return false, errors.Join(fmt.Errorf("look at interface %s: %w", g.iface, err), l.Close())
	}
	info, err := l.Info()
	if err != nil {
		return false, errors.Join(fmt.Errorf("look at the link pinned at %s: %w", path, err), l.Close())
	}
	mode, on := ModeOf(dev), info.XDP() != nil && int(info.XDP().Ifindex) == g.ifindex
	if !on || mode == "" || g.asked != ModeAuto && g.asked != mode {
		return false, DropLink(l)
	}
	if err := l.Update(g.own); err != nil {
		return false, errors.Join(fmt.Errorf("replace the program in the link pinned at %s: %w", path, err), l.Close())
	}
	g.link, g.at.Mode, g.at.Reason = l, mode, ""
	if mode == ModeGeneric && g.asked == ModeAuto {
		g.at.Reason = TakenOverReason
	}
	return true, nil
}

// RemoveKept detaches the program that a process has kept in a folder before its end. It succeeds if there is
// none. Other files in the folder stay.
func RemoveKept(folder string) error {
	var errs []error
	if path := filepath.Join(folder, guestLinkPin); exists(path) {
		errs = append(errs, RemoveLink(path))
	}
	if path := filepath.Join(folder, guestHookPin); exists(path) {
		hook, err := OpenMap(path)
		if err == nil {
			if err = hook.Delete(uint32(0)); errors.Is(err, ebpf.ErrKeyNotExist) {
				err = nil
			}
			err = errors.Join(err, hook.Close())
		}
		errs = append(errs, err, os.Remove(path))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("detach the program that is kept in %s: %w", folder, err)
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
