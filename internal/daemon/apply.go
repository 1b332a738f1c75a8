package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/datapath"
	"github.com/shunt-lb/shunt/internal/model"
	"github.com/shunt-lb/shunt/internal/neighbour"
	"github.com/shunt-lb/shunt/internal/reconcile"
	"github.com/shunt-lb/shunt/internal/source/file"
	"github.com/shunt-lb/shunt/internal/state"
)

// sourceFile is what the state calls the configuration file.
const sourceFile = "file"

// ofFile is what the configuration file declares.
func ofFile(config model.Config) state.Declaration {
	return state.Declaration{Source: sourceFile, Node: &config.Node, Services: config.Services}
}

// Reload reads the file again and applies it. A file with a fault, or a change that needs
// a restart, changes nothing.
func (d *daemon) Reload(ctx context.Context) (control.ReloadResult, error) {
	parsed, err := file.Read(d.opts.ConfigPath)
	if err != nil {
		return control.ReloadResult{Refused: err.Error()}, nil
	}
	parsed.CheckHost(file.LocalHost{}, false)
	result := control.ReloadResult{Faults: parsed.Faults}
	if file.HasErrors(parsed.Faults) {
		result.Refused = "the file has errors; nothing was changed"
		d.conditions.Raise(condition.Condition{Code: condition.ConfigRefused, Severity: condition.Error,
			Subject: d.opts.ConfigPath, Text: "the configuration on disk has errors and was not applied",
			Remedy: "run `shunt check --config " + d.opts.ConfigPath + "`"})
		return result, nil
	}
	if d.opts.Socket != "" {
		parsed.Config.API.Socket = d.opts.Socket
	}
	d.applying.Lock()
	defer d.applying.Unlock()
	if err := d.refusesChange(); err != nil {
		result.Refused = err.Error()
		return result, nil
	}
	d.supervisor.reloading()
	defer func() { d.supervisor.ready(d.summary()) }()
	settings := model.DifferentSettings(d.writer.Snapshot().Config.Node, parsed.Config.Node)
	if refused := needsRestart(settings); refused != "" {
		result.Refused = refused
		return result, nil
	}
	difference, err := d.change(ctx, ofFile(parsed.Config))
	if err != nil {
		result.Refused = err.Error()
		return result, nil
	}
	d.conditions.Clear(condition.ConfigRefused, d.opts.ConfigPath)
	result.Applied, result.Difference, result.Settings = true, difference, settings
	result.Text = differenceText(settings, difference)
	d.changed(difference, settings...)
	d.log.Info("reloaded", "path", d.opts.ConfigPath, "difference", result.Text)
	return result, nil
}

// refusesChange says why nothing may be changed any more, or is nil. The caller holds
// d.applying.
func (d *daemon) refusesChange() error {
	switch {
	case d.stopped:
		return control.ErrStopping
	case d.draining:
		return fmt.Errorf("%w, and waits for flows to end; start it again first", control.ErrStopping)
	}
	return nil
}

// differenceText is a line for each difference, or that there is none.
func differenceText(settings []model.SettingDifference, difference reconcile.Difference) string {
	var lines []string
	for _, s := range settings {
		lines = append(lines, s.String())
	}
	if len(lines) == 0 || !difference.Empty() {
		lines = append(lines, difference.String())
	}
	return strings.Join(lines, "\n")
}

// needsRestart names what cannot be changed under a running data plane, or is empty.
func needsRestart(settings []model.SettingDifference) string {
	for _, fixed := range []struct{ under, why string }{
		{"limits.", "limits size the maps, which are made when the data plane is first loaded; stop shunt (its connections end) and start it with the new limits"},
		{"api.", "the control socket's path and groups cannot change while it is in use; restart shunt; its connections go on if it was started with --on-exit keep"},
	} {
		var which []string
		for _, s := range settings {
			if strings.HasPrefix(s.Key, fixed.under) {
				which = append(which, fmt.Sprintf("%s from %s to %s", s.Key, s.Before, s.After))
			}
		}
		if len(which) > 0 {
			return fmt.Sprintf("%s needs restart: %s. Nothing was changed", strings.Join(which, ", "), fixed.why)
		}
	}
	return ""
}

// change makes this what a source declares. The order is: what may be refused first, new
// interfaces, contents, old interfaces. Whatever is done here is of the snapshot that comes of
// it, which has what other sources declare, too. The caller holds d.applying.
func (d *daemon) change(ctx context.Context, declared state.Declaration) (reconcile.Difference, error) {
	next, err := d.writer.Try(declared)
	if err != nil {
		return reconcile.Difference{}, err
	}
	node := next.Config.Node
	if err := requireInterfaces(d.unknown(node.Interfaces)); err != nil {
		return reconcile.Difference{}, err
	}
	ports, err := portPool(node)
	if err != nil {
		return reconcile.Difference{}, err
	}
	// Without overrides: a backend that is drained for good needs its room again without.
	if _, err := d.reconciler.Plan(reconcile.Desired{Services: next.Configured, Limits: node.Limits}); err != nil {
		return reconcile.Difference{}, err
	}
	if err := d.datapath.Prepare(next.Configured); err != nil {
		return reconcile.Difference{}, err
	}
	// Interfaces before contents: a backend's way out must be known when it is named.
	if err := d.attachInterfaces(node.Interfaces); err != nil {
		return reconcile.Difference{}, err
	}
	if err := d.datapath.SetSettings(node.Timeouts, ports); err != nil {
		return reconcile.Difference{}, err
	}
	d.datapath.SetEncapsulation(node.Encapsulation)
	if _, err := d.writer.Replace(declared); err != nil {
		return reconcile.Difference{}, err
	}
	d.applied = true        // from here on it is carried out, now or by trying again
	d.watching.revision = 0 // what checks read from files may be new, too
	difference, err := d.reconcileNow(ctx)
	if err != nil {
		d.failing(err)
		return difference, fmt.Errorf("the change is carried out in part, and is tried again: %w", err)
	}
	return difference, d.detachOthers(node.Interfaces)
}

// unknown are interfaces that the configuration in force does not have. One that it has and that
// has gone is a condition already, and no reason to refuse other changes.
func (d *daemon) unknown(interfaces []model.Interface) []model.Interface {
	known := d.writer.Snapshot().Config.Interfaces
	return slices.DeleteFunc(slices.Clone(interfaces), func(i model.Interface) bool { return slices.Contains(known, i) })
}

// reconcileNow makes the maps agree with the desired state, and waits before that for the ways to
// backends that are new. It is for changes that somebody asks for, and not for d.loop, which must
// go on.
func (d *daemon) reconcileNow(ctx context.Context) (reconcile.Difference, error) {
	config := d.desired()
	if d.awaitWays(ctx, config.Services) {
		config = d.desired() // without those that are known by now to be out of reach
	}
	return d.carry(config)
}

// desired is what the data plane is to have: the desired state, with what health and next hops
// say, and closed to new flows while this node drains. The caller holds d.applying.
func (d *daemon) desired() model.Config {
	config := d.serving()
	if d.draining {
		config.Services = closedToNew(config.Services)
	}
	return config
}

// wantWays has the next hops of these backends looked up, and of those that the maps still have.
func (d *daemon) wantWays(backends []netip.Addr) {
	d.mu.Lock()
	present := slices.Collect(maps.Keys(d.records))
	d.mu.Unlock()
	d.neighbours.Want(slices.Concat(backends, present))
}

// awaitWays waits for the ways to backends that take flows and were not waited for before. One
// that cannot be reached delays the change that brings it, and none after that. late is whether
// there are such.
func (d *daemon) awaitWays(ctx context.Context, services []model.Service) (late bool) {
	living := slices.Clone(services)
	for i := range living {
		living[i].Backends = slices.DeleteFunc(slices.Clone(living[i].Backends), func(b model.Backend) bool { return b.Down })
	}
	awaited := map[netip.Addr]bool{}
	all := backendAddresses(services)
	for _, a := range all {
		if d.awaited[a] {
			awaited[a] = true // also one that is down, which may be so because it cannot be reached
		}
	}
	var fresh []netip.Addr
	for _, a := range backendAddresses(living) {
		awaited[a] = true
		if !d.awaited[a] {
			fresh = append(fresh, a)
		}
	}
	d.awaited = awaited
	if len(fresh) == 0 {
		return false
	}
	d.wantWays(all)
	wait, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	missing := d.neighbours.Wait(wait, fresh)
	if len(missing) > 0 {
		d.log.Warn("new backends cannot be reached yet; new flows avoid them until they can, as far as a service has others",
			"backends", len(missing), "first", missing[:min(5, len(missing))], "waited", resolveTimeout)
	}
	return len(missing) > 0
}

// carryOut makes the maps agree with what is desired, and waits for nothing.
func (d *daemon) carryOut() (reconcile.Difference, error) { return d.carry(d.desired()) }

// carry is carryOut of what was desired a moment ago.
func (d *daemon) carry(config model.Config) (reconcile.Difference, error) {
	wanted := backendAddresses(config.Services)
	d.wantWays(wanted)
	own, err := hostAddresses()
	if err != nil {
		return reconcile.Difference{}, err
	}
	desired := reconcile.Desired{
		Services: config.Services,
		Sources:  d.allSources(config.SNAT.Addresses, backendAddresses(translated(config.Services))),
		HostOwn:  func(a netip.Addr) bool { return own[a] },
		Limits:   config.Limits,
		Settle:   config.Timeouts.Settle,
	}
	difference, err := d.applyDesired(desired)
	if err != nil {
		return difference, fmt.Errorf("apply the configuration: %w", err)
	}
	if !d.draining { // then all are, and it is meant
		d.nameDeserted(config.Services)
	}
	if err := d.datapath.Heartbeat(); err != nil { // from here on the hops are fresh
		return difference, err
	}
	d.neighbours.Want(wanted)
	return difference, d.announcer.want(config, desired.Sources, own)
}

// applyDesired carries desired out. A source address that is no longer wanted goes only
// after no backend names it.
func (d *daemon) applyDesired(desired reconcile.Desired) (reconcile.Difference, error) {
	defer func() { d.publishSettling(d.reconciler.Settling()) }()
	both := desired
	both.Sources = slices.Concat(desired.Sources, d.sourcesInMaps)
	slices.SortFunc(both.Sources, netip.Addr.Compare)
	both.Sources = slices.Compact(both.Sources)
	difference, err := d.reconciler.Apply(both)
	if _, failed := d.adopt(); err != nil || failed != nil {
		return difference, errors.Join(err, failed)
	}
	d.rewriteHops()
	if len(both.Sources) == len(desired.Sources) {
		return difference, nil
	}
	after, err := d.reconciler.Apply(desired)
	difference.Addresses = append(difference.Addresses, after.Addresses...)
	_, failed := d.adopt()
	return difference, errors.Join(err, failed)
}

// adopt reads the maps, and which backends and source addresses they hold.
func (d *daemon) adopt() (reconcile.Contents, error) {
	contents, err := d.datapath.Contents()
	if err != nil {
		return contents, err
	}
	records := map[netip.Addr][]reconcile.BackendRecord{}
	for _, r := range contents.Backends {
		records[r.Address] = append(records[r.Address], r)
	}
	d.sourcesInMaps = nil
	for a, r := range contents.Addresses {
		if r.Source {
			d.sourcesInMaps = append(d.sourcesInMaps, a)
		}
	}
	d.mu.Lock()
	d.records = records
	d.mu.Unlock()
	return contents, nil
}

// beforeNaming gives new backends their next hops and sources, before a slot names them.
func (d *daemon) beforeNaming(records []reconcile.BackendRecord) {
	d.mu.Lock()
	for _, r := range records {
		if !slices.Contains(d.records[r.Address], r) {
			d.records[r.Address] = append(d.records[r.Address], r)
		}
	}
	d.mu.Unlock()
	d.writing.Lock()
	defer d.writing.Unlock()
	for _, r := range records {
		if hop, ok := d.hops[r.Address]; ok {
			d.writeHop(hop, []reconcile.BackendRecord{r})
		}
	}
}

// rewriteHops tells the data plane the ways again, after interfaces or sources changed.
func (d *daemon) rewriteHops() {
	d.writing.Lock()
	defer d.writing.Unlock()
	for address, hop := range d.hops {
		d.mu.Lock()
		records := slices.Clone(d.records[address])
		d.mu.Unlock()
		d.writeHop(hop, records)
	}
}

// wayToHost is the way to backends that are this host: an interface that has attach: tc, where
// their answers are met; else any, which is enough for direct return.
func (d *daemon) wayToHost() (iface int, mac net.HardwareAddr, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(d.attachments)) {
		mode := datapath.Mode(d.attachments[name].Mode)
		dev, err := net.InterfaceByName(name)
		if err != nil || ok && !mode.AtTC() {
			continue
		}
		if iface == 0 || mode.AtTC() {
			iface, mac, ok = dev.Index, dev.HardwareAddr, mode.AtTC()
		}
		if ok {
			break
		}
	}
	return iface, mac, ok
}

// hopChanged is the neighbour watcher's report.
func (d *daemon) hopChanged(hop neighbour.Hop) {
	d.writing.Lock()
	defer d.writing.Unlock()
	d.hops[hop.Address] = hop
	d.mu.Lock()
	records := slices.Clone(d.records[hop.Address])
	d.mu.Unlock()
	d.writeHop(hop, records)
	d.log.Debug("next hop", "backend", hop.Address, "via", hop.NextHop, "mac", hop.MAC.String(), "resolved", hop.Resolved)
}

// writeHop tells the data plane the way to backends that share an address.
func (d *daemon) writeHop(hop neighbour.Hop, records []reconcile.BackendRecord) {
	sources := d.sourcesFor(d.writer.Snapshot().Config.SNAT.Addresses, hop)
	for _, r := range records {
		// A MAC that does not answer now is still the best one known.
		if len(hop.MAC) > 0 {
			err := d.datapath.SetHop(r.BackendRef, datapath.Hop{Interface: hop.Interface, MAC: hop.MAC})
			if err != nil && !errors.Is(err, datapath.ErrGone) {
				d.log.Warn("the way to a backend was not stored", "backend", r.BackendAddress, "error", err)
			}
		}
		if len(sources) > 0 {
			err := d.datapath.SetSources(r.BackendRef, sources)
			if err != nil && !errors.Is(err, datapath.ErrGone) {
				d.log.Warn("the source addresses towards a backend were not stored", "backend", r.BackendAddress, "error", err)
			}
		}
	}
	d.mu.Lock()
	before, known := d.sources[hop.Address]
	if len(sources) > 0 { // without a route now, flows still use the last ones
		d.sources[hop.Address] = sources
	}
	d.mu.Unlock()
	if known && len(sources) > 0 && !slices.Equal(before, sources) {
		d.wantRetry() // the new source has to become one of our addresses
	}
}

// sourcesFor is where full NAT sends from towards a hop.
func (d *daemon) sourcesFor(configured []netip.Addr, hop neighbour.Hop) []netip.Addr {
	var sources []netip.Addr
	for _, a := range configured {
		if a.Is4() == hop.Address.Is4() {
			sources = append(sources, a)
		}
	}
	if len(configured) == 0 && hop.Source.IsValid() {
		sources = append(sources, hop.Source)
	}
	return sources
}

// allSources is every address that full NAT sends from.
func (d *daemon) allSources(configured, backends []netip.Addr) []netip.Addr {
	set := map[netip.Addr]bool{}
	for _, a := range configured {
		set[a] = true
	}
	d.mu.Lock()
	last := maps.Clone(d.sources)
	d.mu.Unlock()
	for _, b := range backends {
		hop, _ := d.neighbours.Hop(b)
		sources := d.sourcesFor(configured, hop)
		if len(sources) == 0 && len(configured) == 0 {
			sources = last[b]
		}
		for _, s := range sources {
			set[s] = true
		}
	}
	return slices.SortedFunc(maps.Keys(set), netip.Addr.Compare)
}

// portPool is where source ports of full NAT come from.
func portPool(node model.Node) (model.PortRange, error) {
	if node.SNAT.Ports != (model.PortRange{}) {
		return node.SNAT.Ports, nil
	}
	return freePorts()
}

// translated are the services whose packets get another source address.
func translated(services []model.Service) []model.Service {
	return slices.DeleteFunc(slices.Clone(services), func(s model.Service) bool { return s.Forwarding.Direct() })
}

func backendAddresses(services []model.Service) []netip.Addr {
	set := map[netip.Addr]bool{}
	for _, s := range services {
		for _, b := range s.Backends {
			set[b.Address] = true
		}
	}
	return slices.SortedFunc(maps.Keys(set), netip.Addr.Compare)
}

// attachInterfaces attaches to what is not attached yet, or wanted in another mode. When
// one refuses, those that were not attached before are detached again.
func (d *daemon) attachInterfaces(interfaces []model.Interface) error {
	inForce := d.writer.Snapshot().Config.Interfaces
	before := map[string]model.Attach{}
	for _, i := range inForce {
		before[i.Name] = i.Attach
	}
	for _, i := range interfaces {
		if mode, ok := before[i.Name]; ok && mode == i.Attach {
			continue
		}
		if err := d.attach(i); err != nil {
			if d.applied {
				err = errors.Join(err, d.detachOthers(inForce))
			}
			return err
		}
	}
	return nil
}

func (d *daemon) attach(i model.Interface) error {
	a, err := d.datapath.Attach(i.Name, i.Attach)
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.attachments[i.Name] = &shuntv1.Attachment{Interface: i.Name, Mode: string(a.Mode), Reason: a.Reason}
	d.mu.Unlock()
	d.log.Info("attached", "interface", i.Name, "mode", a.Mode, "reason", a.Reason)
	if a.Mode == datapath.ModeGeneric && i.Attach == model.AttachAuto {
		d.conditions.Raise(condition.Condition{Code: condition.AttachDegraded, Severity: condition.Warning, Subject: i.Name,
			Text: "attached in generic mode, because the driver refused native mode: " + a.Reason, Remedy: "use a driver with native XDP, or say `attach: generic` to accept it"})
	} else {
		d.conditions.Clear(condition.AttachDegraded, i.Name)
	}
	if err := d.settleAggregation(i.Name, a.Mode); err != nil {
		return errors.Join(err, d.detachFrom(i.Name))
	}
	return nil
}

func (d *daemon) detachFrom(name string) error {
	err := errors.Join(d.datapath.Detach(name), d.release(name))
	d.mu.Lock()
	delete(d.attachments, name)
	d.mu.Unlock()
	d.conditions.Clear(condition.AttachDegraded, name)
	d.conditions.Clear(condition.AttachFailed, name)
	d.conditions.Clear(condition.InterfaceMissing, name)
	d.log.Info("detached", "interface", name)
	return err
}

// attachedTo names the interfaces that the daemon has attached to.
func (d *daemon) attachedTo() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.attachments))
}

// detachOthers detaches from interfaces that are no longer wanted.
func (d *daemon) detachOthers(interfaces []model.Interface) error {
	var errs []error
	for name := range maps.Clone(d.attachments) {
		if slices.ContainsFunc(interfaces, func(i model.Interface) bool { return i.Name == name }) {
			continue
		}
		errs = append(errs, d.detachFrom(name))
	}
	// A predecessor may have left attachments to interfaces that this file does not list.
	for _, name := range d.datapath.Attached() {
		if !slices.ContainsFunc(interfaces, func(i model.Interface) bool { return i.Name == name }) {
			errs = append(errs, d.detachFrom(name))
		}
	}
	return errors.Join(errs...)
}

// refreshInterfaces follows changes of MAC and addresses, and attaches again to an
// interface that was removed and made anew under its name.
func (d *daemon) refreshInterfaces() {
	if !d.applying.TryLock() {
		return // a change is under way; in a second again
	}
	defer d.applying.Unlock()
	for _, i := range d.writer.Snapshot().Config.Interfaces {
		name := i.Name
		if _, err := net.InterfaceByName(name); err != nil {
			d.conditions.Clear(condition.AttachFailed, name)
			d.conditions.Raise(condition.Condition{Code: condition.InterfaceMissing, Severity: condition.Error, Subject: name,
				Text: "the interface, which the configuration lists, does not exist", Remedy: "bring the interface back; shunt then attaches to it by itself"})
			continue
		}
		err := d.datapath.RefreshInterface(name)
		if err != nil {
			if err = d.attach(i); err == nil {
				d.wantRetry() // hops and announcements name the new one
			}
		}
		if err != nil {
			d.conditions.Raise(condition.Condition{Code: condition.AttachFailed, Subject: name,
				Text: err.Error()})
		} else {
			d.conditions.Clear(condition.AttachFailed, name)
		}
		d.conditions.Clear(condition.InterfaceMissing, name)
	}
}
