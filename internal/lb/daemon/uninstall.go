package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/lb/announce"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/decap"
	"github.com/shunt-lb/shunt/internal/lb/detour"
	"github.com/shunt-lb/shunt/internal/lb/neighbour"
	"github.com/shunt-lb/shunt/internal/lb/realserver"
	"github.com/shunt-lb/shunt/internal/namespace"
	"github.com/shunt-lb/shunt/internal/node"
)

// Trace is one thing that shunt has left on the machine.
type Trace struct {
	Kind string `json:"kind"` // pin, neighbour, group, setting, device, address, guard, decoy, file
	What string `json:"what"`
}

// Inventory lists everything of shunt's on the machine except the installed files: the binary and the
// configuration. While an inventory is held, no daemon can start. The caller closes it.
type Inventory struct {
	Traces []Trace `json:"traces"`
	// Elsewhere are the traces that only a command in another network namespace can remove.
	Elsewhere []Trace `json:"elsewhere"`

	instances []string
	space     string
	decap     *realserver.Record
	files     []string
	others    []func() error // remove the traces that Also has listed
	unlock    []func()
}

// Also adds another product's trace, and the function that removes it.
func (v *Inventory) Also(t Trace, remove func() error) {
	v.Traces = append(v.Traces, t)
	v.others = append(v.others, remove)
}

// TakeInventory finds the traces of shunt. socket is the control socket's path if it is known; it need not
// exist. TakeInventory refuses while a daemon or `shunt decap` runs, and names it.
func TakeInventory(socket string) (*Inventory, error) {
	v := &Inventory{Traces: []Trace{}, Elsewhere: []Trace{}}
	if err := v.take(socket); err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

// Close lets daemons start again.
func (v *Inventory) Close() {
	for _, unlock := range v.unlock {
		unlock()
	}
	v.unlock = nil
	_ = os.Remove(node.RunDirectory) // taking hold of an instance makes it
}

func (v *Inventory) add(kind, format string, values ...any) {
	v.Traces = append(v.Traces, Trace{kind, fmt.Sprintf(format, values...)})
}

func (v *Inventory) take(socket string) error {
	var err error
	if v.space, err = host.Space(); err != nil {
		return err
	}
	if v.instances, err = Instances(); err != nil {
		return err
	}
	for _, instance := range v.instances {
		unlock, err := node.Lock(instance)
		if err != nil {
			return err
		}
		v.unlock = append(v.unlock, unlock)
	}
	for _, instance := range v.instances {
		if err := v.takeInstance(instance); err != nil {
			return err
		}
	}
	left, err := neighbour.Left()
	if err != nil {
		return err
	}
	for _, entry := range left {
		v.add("neighbour", "%s", entry)
	}
	if err := v.takeDecap(); err != nil {
		return err
	}
	v.takeFiles(socket)
	return nil
}

// Instances are the instances that run or have left something: a pin, or a file named after the instance.
func Instances() ([]string, error) {
	names, err := attach.Instances()
	if err != nil {
		return nil, err
	}
	for _, pattern := range []string{node.RunDirectory + "/*.lock", node.RunDirectory + "/*.aggregation", node.RunDirectory + "/*" + loopbackSuffix, node.RunDirectory + "/*" + detourSuffix, node.RunDirectory + "/*" + serverSuffix, node.StateDirectory() + "/*.overrides.json", node.StateDirectory() + "/*" + namesSuffix} {
		paths, _ := filepath.Glob(pattern)
		for _, path := range paths {
			name, _, _ := strings.Cut(filepath.Base(path), ".")
			if !strings.HasPrefix(name, "decap-ns-") {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

func (v *Inventory) takeInstance(instance string) error {
	pins, err := attach.PinnedOf(instance)
	if err != nil {
		return err
	}
	for _, p := range pins {
		v.add("pin", "%s: %s", p.Path, p.What)
	}
	groups := map[string]bool{}
	for _, p := range leftAnnounced(instance, slog.Default()) {
		if group, joined := announce.Joined(p.addr, p.iface); joined {
			groups[fmt.Sprintf("%s on %s", group, interfaceName(p.iface))] = true
		}
	}
	for _, text := range slices.Sorted(maps.Keys(groups)) {
		v.add("group", "%s", text)
	}
	switchedOff, err := newOffloads(instance, nil, nil).read()
	if err != nil {
		return err
	}
	for _, change := range switchedOff.Changes {
		v.add("setting", "%s: switched on again", change)
	}
	loopback, err := readLoopback(loopbackPath(instance))
	if err != nil {
		return err
	}
	var settings []Trace
	for _, s := range loopback.State.Settings {
		settings = append(settings, Trace{"setting", fmt.Sprintf("%s: back to %s", s.Name, s.Before)})
	}
	v.addIn(loopback.Space, settings...)
	server, err := readServer(instance)
	if err != nil {
		return err
	}
	var changes []Trace
	for _, a := range server.State.Addresses {
		changes = append(changes, Trace{"address", fmt.Sprintf("%s: on lo, for this machine's own server", a)})
	}
	for _, s := range server.State.Settings {
		changes = append(changes, Trace{"setting", fmt.Sprintf("%s: back to %s", s.Name, s.Before)})
	}
	v.addIn(server.Space, changes...)
	record, err := readDetour(instance)
	if err != nil {
		return err
	}
	if record.Number != 0 {
		v.addIn(record.Space, Trace{"device", detour.Device(record.Number) + ": for health checks, with its routing rules and routes"})
	}
	return nil
}

// addIn adds a trace in a network namespace that may be another one, and may be gone.
func (v *Inventory) addIn(space string, traces ...Trace) {
	list, where := &v.Traces, ""
	if space != v.space && len(traces) > 0 {
		where = " in network namespace " + space
		ns := findSpace(space)
		defer namespace.Close(ns)
		if !ns.IsOpen() {
			list = &v.Elsewhere
		}
	}
	for _, trace := range traces {
		trace.What += where
		if !slices.Contains(*list, trace) { // another instance may have it, too
			*list = append(*list, trace)
		}
	}
}

// takeDecap finds the remains of `shunt decap` in this network namespace, and names other namespaces with
// remains.
func (v *Inventory) takeDecap() error {
	pins, err := decap.Pinned()
	if err != nil {
		return err
	}
	spaces := map[string]bool{}
	for space := range pins {
		spaces[space] = true
	}
	records, _ := filepath.Glob(node.RunDirectory + "/decap-ns-*")
	for _, path := range records {
		name, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), "decap-"), ".")
		spaces[name] = true
	}
	for _, space := range slices.Sorted(maps.Keys(spaces)) {
		if space != v.space {
			v.Elsewhere = append(v.Elsewhere, Trace{"decap", "changes by `shunt decap` in network namespace " + space})
			continue
		}
		if v.decap, err = realserver.OpenRecord(node.RunDirectory, space); err != nil {
			return err
		}
		v.unlock = append(v.unlock, func() { _ = v.decap.Close() })
		state, err := v.decap.Read()
		if err != nil {
			return err
		}
		if path, is := pins[space]; is {
			v.add("pin", "%s: program that removes outer headers", path)
		}
		for _, a := range state.Addresses {
			v.add("address", "%s on lo", a)
		}
		for _, s := range state.Settings {
			v.add("setting", "%s: back to %s", s.Name, s.Before)
		}
	}
	return nil
}

// takeFiles finds files, except for the locks that this inventory holds and the files of other namespaces.
func (v *Inventory) takeFiles(socket string) {
	var files []string
	for _, directory := range []string{node.RunDirectory, node.StateDirectory()} {
		entries, _ := os.ReadDir(directory)
		for _, e := range entries {
			name := e.Name()
			mine := strings.HasPrefix(name, "decap-"+v.space+".")
			if strings.HasSuffix(name, ".lock") && (mine || slices.Contains(v.instances, strings.TrimSuffix(name, ".lock"))) ||
				strings.HasPrefix(name, "decap-ns-") && !mine {
				continue
			}
			files = append(files, filepath.Join(directory, name))
		}
	}
	for _, socket := range []string{socket, control.ReadSocket(socket)} {
		if info, err := os.Lstat(socket); err == nil && info.Mode()&fs.ModeSocket != 0 && !slices.Contains(files, socket) {
			files = append(files, socket)
		}
	}
	v.files = files
	for _, path := range files {
		v.add("file", "%s", path)
	}
}

// Remove removes everything that the inventory lists. It continues after a failure.
func (v *Inventory) Remove(log *slog.Logger) error {
	var errs []error
	for _, instance := range v.instances {
		errs = append(errs, remove(instance, log))
	}
	if v.decap != nil {
		state, err := v.decap.Read()
		if err = errors.Join(err, decap.Remove("", v.space)); err == nil {
			state, err = state.Restore()
			err = errors.Join(err, v.decap.Write(state))
		}
		errs = append(errs, err)
	}
	for _, remove := range v.others {
		errs = append(errs, remove())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("some changes could not be undone, so the files that record them are kept; run `shunt uninstall` again: %w", err)
	}
	for _, path := range v.files {
		if err := os.RemoveAll(path); err != nil {
			errs = append(errs, err)
		}
	}
	if err := os.Remove(node.StateDirectory()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func interfaceName(index int) string {
	link, err := net.InterfaceByIndex(index)
	if err != nil {
		return fmt.Sprint("interface ", index)
	}
	return link.Name
}
