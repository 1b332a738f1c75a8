package store

import (
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
	if policy.Tunnelled {
		needed |= abi.FEATURE_TUNNELLED
	}
	return needed
}

// FeaturesInUse lists the features that the services in the maps need. Features that a predecessor had and no
// service needs any more are left out from then on.
func (v *View) FeaturesInUse() (needed abi.Feature) {
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
	if v.maps[abi.MapTunnelProgs].Iterate().Next(new(uint32), new(uint32)) {
		needed |= abi.FEATURE_TUNNELLED
	}
	for i := range v.backends {
		if v.isHost(v.backends[i].Hop) {
			needed |= abi.FEATURE_HOST
		}
	}
	return needed
}

// isHost reports whether a hop leads to this host itself: to the hardware address of its own interface.
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

// FeaturesOf lists the features of the program that services need.
func FeaturesOf(services []*model.Service) (needed abi.Feature) {
	for _, s := range services {
		needed |= featuresOf(s.Forwarding, s.AffinityTimeout > 0, s.Policy)
	}
	return needed
}
