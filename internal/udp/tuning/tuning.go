// Package tuning keeps the interrupts of interfaces off while programs make their drivers work (busy polling), and restores
// the earlier values.
//
//	packets ─► card ─┬─ interrupt, off for `busy_poll` after each poll ─► softirq ─► ring
//	                 └─ a program polls ───────────────────────────────────────────► ring
//
// Two files of an interface control this: after napi_defer_hard_irqs polls that found nothing the interrupt is on again, and
// until then a timer of gro_flush_timeout polls if no program does. They belong to the interface, so they hold for all of its
// queues and for all programs that use it.
//
// Invariant: each change is written down before it is made, so that a later process can undo it. If a value is not the
// one that was set, it has been changed by somebody else since, and it stays.
//
// Source: Documentation/networking/napi.rst (Software IRQ coalescing) of Linux.
package tuning

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/record"
	"github.com/vishvananda/netlink"
)

// emptyPolls is the number of polls in a row that may find nothing before the interrupt is on again: the value in the kernel's
// documentation of AF_XDP.
const emptyPolls = 2

// files are an interface's, in the order in which they are written: a timer without deferred interrupts only holds packets
// of TCP back for a moment, and deferred interrupts without a timer would leave packets in the card.
var files = [...]string{"gro_flush_timeout", "napi_defer_hard_irqs"}

// values are the contents of the files: nanoseconds, polls.
type values [len(files)]uint64

func valuesFor(quiet time.Duration) values { return values{uint64(quiet.Nanoseconds()), emptyPolls} }

// change is a change of an interface.
type change struct {
	Interface string `json:"interface"`
	Index     int    `json:"index"`
	Was       values `json:"was"`
	Set       values `json:"set"`
}

type state struct {
	Changes []change `json:"changes"`
}

// Tuner changes interfaces of the calling thread's network namespace. One call at a time.
type Tuner struct {
	path string // of the record
	net  string // folder with the interfaces' folders
}

// New keeps its record at a path, where none need be yet. net is the folder with the interfaces' folders: Net except in tests.
func New(path, net string) *Tuner { return &Tuner{path, net} }

// Net is the folder with the interfaces' folders on a machine.
const Net = "/sys/class/net"

// Keep keeps the interrupts of these interfaces off for a time after each poll. It restores other interfaces that it has changed,
// also in an earlier process. The errors are by interface; "" is the record's.
func (t *Tuner) Keep(wanted map[string]time.Duration) map[string]error {
	failed := map[string]error{}
	s, err := t.read()
	if err != nil {
		failed[""] = err
		return failed
	}
	s, failed = t.putBack(s, func(c change) bool { _, stays := wanted[c.Interface]; return !stays })
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		if s, err = t.set(s, name, valuesFor(wanted[name])); err != nil {
			failed[name] = fmt.Errorf("switch interrupts of %s off for busy polling: %w", name, err)
		}
	}
	if err := t.write(s); err != nil {
		failed[""] = err
	}
	return failed
}

// PutBack undoes all changes of this process and earlier ones.
func (t *Tuner) PutBack() error {
	_, err := t.PutBackAll()
	return err
}

// Changed returns the interfaces with changes to be undone.
func (t *Tuner) Changed() (names []string, err error) {
	s, err := t.read()
	for _, c := range s.Changes {
		names = append(names, c.Interface)
	}
	return names, err
}

// PutBackAll does the same as PutBack, and returns the interfaces.
func (t *Tuner) PutBackAll() (names []string, err error) {
	names, err = t.Changed()
	if err != nil {
		return nil, err
	}
	var errs []error
	failed := t.Keep(nil)
	names = slices.DeleteFunc(names, func(name string) bool { return failed[name] != nil })
	for _, name := range slices.Sorted(maps.Keys(failed)) {
		errs = append(errs, failed[name])
	}
	return names, errors.Join(errs...)
}

func (t *Tuner) read() (s state, err error) {
	if err := record.Read(t.path, &s); err != nil {
		return state{}, fmt.Errorf("read the record of interrupts that are off: %w; `echo 0` into %s of the interfaces in %s restores the default, then delete %s",
			err, strings.Join(files[:], " and "), t.net, t.path)
	}
	return s, nil
}

func (t *Tuner) write(s state) error {
	if len(s.Changes) == 0 {
		return record.Remove(t.path)
	}
	if err := record.Write(t.path, s); err != nil {
		return fmt.Errorf("record the interrupts that are off: %w", err)
	}
	return nil
}

// set gives an interface values. The returned state has to be written, whether or not set failed.
func (t *Tuner) set(s state, name string, want values) (state, error) {
	index, err := t.index(name)
	if err != nil {
		return s, err
	}
	at := slices.IndexFunc(s.Changes, func(c change) bool { return c.Interface == name })
	if at >= 0 && s.Changes[at].Index != index { // the change went with another interface of that name
		s.Changes = slices.Delete(s.Changes, at, at+1)
		at = -1
	}
	is, err := t.values(name)
	if err != nil || is == want {
		return s, err // a value that was there before is not shunt's to restore
	}
	if at < 0 {
		s.Changes = append(s.Changes, change{Interface: name, Index: index, Was: is, Set: want})
		at = len(s.Changes) - 1
	}
	before := s.Changes[at].Set
	s.Changes[at].Set = want
	if err := t.write(s); err != nil {
		return s, err
	}
	for i, file := range files {
		if err := t.put(name, file, want[i]); err != nil {
			s.Changes[at].Set = before
			return s, err
		}
	}
	return s, nil
}

// putBack undoes the changes for which is returns true, and keeps the changes that it could not undo.
func (t *Tuner) putBack(s state, is func(change) bool) (left state, failed map[string]error) {
	failed = map[string]error{}
	for _, c := range s.Changes {
		if !is(c) {
			left.Changes = append(left.Changes, c)
			continue
		}
		if err := t.restore(c); err != nil {
			left.Changes = append(left.Changes, c)
			failed[c.Interface] = fmt.Errorf("restore the interrupts of %s: %w", c.Interface, err)
		}
	}
	return left, failed
}

func (t *Tuner) restore(c change) error {
	var missing netlink.LinkNotFoundError
	dev, err := netlink.LinkByIndex(c.Index)
	if errors.As(err, &missing) {
		return nil // the change went with the interface
	}
	if err != nil {
		return err
	}
	name := dev.Attrs().Name // the interface may have been renamed
	if _, err := t.index(name); err != nil {
		return err
	}
	is, err := t.values(name)
	if err != nil {
		return err
	}
	for i, file := range slices.Backward(files[:]) {
		if is[i] != c.Set[i] {
			continue
		}
		if err := t.put(name, file, c.Was[i]); err != nil {
			return err
		}
	}
	return nil
}

// index returns an interface's index, if the folder belongs to it: /sys shows the network namespace in which it was mounted.
func (t *Tuner) index(name string) (int, error) {
	dev, err := netlink.LinkByName(name)
	if err != nil {
		return 0, err
	}
	index := dev.Attrs().Index
	shown, err := t.number(name, "ifindex")
	if err != nil || int(shown) != index {
		return 0, fmt.Errorf("%s does not show this network namespace: start shunt with `ip netns exec`, or mount sysfs there", t.net)
	}
	return index, nil
}

// Now returns an interface's values at this moment, even if another program has set them: the time after a poll when
// the kernel polls itself, and the number of polls that found nothing after which the interrupt is on again (0: it is
// on). It may be called while another call runs.
func (t *Tuner) Now(name string) (quiet time.Duration, polls uint32, err error) {
	_, err = t.index(name)
	var is values
	if err == nil {
		is, err = t.values(name)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("read whether the interrupts of %s are off: %w", name, err)
	}
	return time.Duration(is[0]), uint32(is[1]), nil
}

func (t *Tuner) values(name string) (is values, err error) {
	for i, file := range files {
		if is[i], err = t.number(name, file); err != nil {
			return values{}, err
		}
	}
	return is, nil
}

func (t *Tuner) number(name, file string) (uint64, error) {
	text, err := os.ReadFile(filepath.Join(t.net, name, file))
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
}

func (t *Tuner) put(name, file string, n uint64) error {
	err := os.WriteFile(filepath.Join(t.net, name, file), []byte(strconv.FormatUint(n, 10)), 0)
	if errors.Is(err, syscall.EROFS) {
		err = fmt.Errorf("%w; with systemd: ProtectKernelTunables=no in a drop-in", err)
	}
	return err
}
