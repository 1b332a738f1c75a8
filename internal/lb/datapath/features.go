package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// featuresOf lists the features of the program that a service needs.
func featuresOf(forwarding model.Forwarding, affinity bool, policy model.Policy) (needed abi.Feature) {
	if forwarding.Direct() {
		needed |= abi.FEATURE_DIRECT | abi.FEATURE_REMEMBER
	}
	if affinity {
		needed |= abi.FEATURE_REMEMBER
	}
	if policy.HashAddresses {
		needed |= abi.FEATURE_ADDRESSES
	}
	if policy.TCPMSS > 0 {
		needed |= abi.FEATURE_MSS
	}
	return needed
}

// featuresAt lists the features of the program that an interface needs, by its way of attachment: behind a parent that
// takes its tags off, or not.
func featuresAt(mode model.Attach, behind bool) abi.Feature {
	switch {
	case mode == model.AttachTC: // whose host may be a client, and answers come in anywhere
		return abi.FEATURE_HOST
	case behind:
		return abi.FEATURE_VLAN
	}
	return 0
}

// featuresInUse lists the features that the services in the maps need. What a predecessor had and nobody needs
// any more is left out from then on.
func (v *View) featuresInUse() (needed abi.Feature) {
	for i := range v.services {
		if s := &v.services[i]; s.Live != 0 {
			needed |= featuresOf(abi.FromNumber(abi.Forwardings, s.Forwarding), s.AffinityTicks > 0, abi.FromPolicy(s))
		}
	}
	if v.maps[abi.MapVlans].Iterate().Next(new(abi.VlanKey), new(uint32)) {
		needed |= abi.FEATURE_VLAN
	}
	if v.maps[abi.MapDecapProgs].Iterate().Next(new(uint32), new(uint32)) {
		needed |= abi.FEATURE_DECAP
	}
	for i := range v.backends {
		if v.isHost(v.backends[i].Hop) {
			needed |= abi.FEATURE_HOST
		}
	}
	return needed
}

// isHost is whether a hop leads to this host itself: to the hardware address of its own interface.
func (v *View) isHost(hop uint64) bool {
	if hop == 0 {
		return false
	}
	var record abi.Interface
	index := uint32(hop>>abi.HOP_INTERFACE_SHIFT) & uint32(abi.HOP_INTERFACE_MASK)
	if err := v.maps[abi.MapInterfaces].Lookup(index, &record); err != nil {
		return false
	}
	return record.Ifindex != 0 && abi.ToHop(record.Mac[:], index) == hop
}

// Prepare has the programs know what these services need, before any of them is written: else each
// that needs more than those before has all programs loaded once more.
func (d *Datapath) Prepare(services []*model.Service) error {
	var needed abi.Feature
	for _, s := range services {
		needed |= featuresOf(s.Forwarding, s.AffinityTimeout > 0, s.Policy)
	}
	return d.require(needed)
}

// require has the program on every interface know these features, before anything is written
// that needs them. Where one is missing the program is loaded anew and takes the place of the old
// one in a single step, so no packet is lost. It fails without having changed what the maps say.
func (d *Datapath) require(needed abi.Feature) (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.features&needed == needed {
		return nil
	}
	unlock, err := kernel.Lock(d.root, d.instance)
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
	return d.renewAll(func(*attached) bool { return true })
}

// renewAll loads the programs of these interfaces anew.
func (d *Datapath) renewAll(which func(*attached) bool) error {
	for name, old := range d.attached {
		if !which(old) {
			continue
		}
		a := *old
		if err := d.renew(&a); err != nil {
			return fmt.Errorf("replace the program on interface %s by one with other features: %w", name, err)
		}
		_ = old.closePrograms()
		d.attached[name] = &a
	}
	return d.grace.Wait() // a run of the old program must not see what comes now
}

// renew loads an attached interface's program anew, and has the interface run it.
func (d *Datapath) renew(a *attached) error {
	a.programs = [len(directions)]*ebpf.Program{} // the old ones go when all have new ones
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
			if err := s.Update(a.programs[i]); err != nil {
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
	if err := d.run(a, a.link.Update); err != nil {
		return errors.Join(err, a.closePrograms())
	}
	return d.deliver(a)
}
