package attach

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// featuresAt lists the features of the program that an interface needs, by its kind of attachment: behind a
// parent that removes its tags, or not.
func featuresAt(mode model.Attach, behind bool) abi.Feature {
	switch {
	case mode == model.AttachTC: // its host may be a client, and answers come in at any interface
		return abi.FEATURE_HOST
	case behind:
		return abi.FEATURE_VLAN
	}
	return 0
}

// Prepare tells the programs the needs of these services, before any service is written: otherwise each service
// that needs more features than the earlier ones would make all programs load once more.
func (d *Plane) Prepare(services []*model.Service) error {
	return d.require(store.FeaturesOf(services))
}

// require makes the program on every interface support these features, before anything is written that needs
// them. A program that lacks a feature is loaded anew and replaces the old one in a single step, so no packet
// is lost. If require fails, the maps are unchanged.
func (d *Plane) require(needed abi.Feature) (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.features&needed == needed {
		return nil
	}
	unlock, err := kernel.Lock(d.opts.PinRoot, d.opts.Instance)
	if err != nil {
		return err
	}
	defer unlock()
	before := d.features
	d.features |= needed
	defer func() {
		if err != nil { // an interface that has them already may keep them
			d.features = before
		}
	}()
	return d.renewAll()
}

// renewAll loads all programs anew.
func (d *Plane) renewAll() error {
	err := d.closeShared() // where they are attached they run on
	if err == nil {
		err = d.renewThese(func(*attached) bool { return true })
	}
	if err == nil && d.atTC.expected {
		err = d.loadShared()
	}
	return err
}

// renewThese loads the programs of these interfaces anew. The programs that pods share must be closed before. An interface that has
// gone is skipped.
func (d *Plane) renewThese(which func(*attached) bool) error {
	for name, old := range d.attached {
		if !which(old) {
			continue
		}
		a := *old
		if err := d.renew(&a); err != nil {
			if !old.isThere() {
				continue
			}
			return fmt.Errorf("replace the program on interface %s by one with other features: %w", name, err)
		}
		_ = old.closePrograms()
		d.attached[name] = &a
	}
	return d.Grace() // a run of the old program must not see the new entries
}

// renew loads an attached interface's program anew, and makes the interface run it.
func (d *Plane) renew(a *attached) error {
	a.programs = [len(directions)]*ebpf.Program{} // the old programs are closed when all interfaces have new ones
	if a.vlan != nil {
		if err := d.loadVLAN(a); err != nil {
			return err
		}
		return d.deliver(a)
	}
	if a.Mode.AtTC() {
		if err := d.loadTC(a); err != nil {
			return err
		}
		for i, s := range a.sides {
			if err := s.Update(d.programOf(a, i)); err != nil && (!a.isPod || a.isThere()) {
				return errors.Join(err, a.closePrograms())
			}
		}
		return nil
	}
	chain, _, err := d.openChain(a.Interface)
	if err != nil {
		return err
	}
	defer chain.Close()
	a.chain = chain
	if err := d.load(a); err != nil {
		return err
	}
	if a.tunnelled {
		if err := d.loadTunnelled(a); err != nil {
			return errors.Join(err, a.closePrograms())
		}
	}
	if err := d.run(a, a.link.Update); err != nil {
		return errors.Join(err, a.closePrograms())
	}
	return d.deliver(a)
}
