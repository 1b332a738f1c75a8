package model

import (
	"fmt"
	"net/netip"
)

// BackendAddress is a backend's identity: services that name the same address and
// port share the backend.
type BackendAddress struct {
	Address netip.Addr // unmapped
	Port    uint16     // host byte order; 0 keeps the packet's destination port
}

// String returns "10.0.0.2:8080", or "10.0.0.2" if the packet's port is kept.
func (b BackendAddress) String() string {
	if b.Port == 0 {
		return b.Address.String()
	}
	return netip.AddrPortFrom(b.Address, b.Port).String()
}

// Backend is one server of a service. It has three parts, each with one writer:
//
//	declaration   sources, in the services that they declare     read by all packages
//	Override      state, in the services of a snapshot;           read by health, and as EffectiveWeight
//	              the daemon, while the whole node drains
//	observation   health, in the services that it serves          read by reconcile, way, status, and as Share
//
// The later parts are the zero value until their writer has seen the service. No writer changes an earlier part, so a
// served backend still has its source's declaration.
type Backend struct {
	BackendAddress

	// Declaration. The weight belongs to the service, not to the address: two services may weigh one backend differently.

	Weight uint16 // 0: no new flows
	Name   string // in output; BackendAddress.String() unless configured
	Backup bool   // takes new flows only while no other backend of its family can
	// CheckAt is the target of its checks, if it is not the backend's own address: an address, a port, or both.
	// A zero part is the backend's own.
	CheckAt BackendAddress
	// DNS is the name by which its address was looked up; "": the source has given the address.
	DNS string

	Override BackendOverride

	Observed BackendObservation
}

// BackendOverride is the part of a backend that takes precedence over the declaration. The zero value leaves
// the declaration and the checks unchanged.
type BackendOverride struct {
	Health HealthState // HealthUp or HealthDown, against the checks; "": the checks decide
	// Weighs: Weight replaces the declared weight. A drain is the weight 0.
	Weighs bool
	Weight uint16
}

// BackendObservation is the part of a backend that its checks and its neighbours decide. With the zero value it takes flows by its weight.
type BackendObservation struct {
	// Idle: it takes no new flows now, even with a weight: it is down, waits for its first
	// success, or is a backup that is not needed.
	Idle bool
	// Down: it is idle because it is down. Flows without an established connection there move.
	Down bool
	// Ramp is the present share of its weight, in percent; 0: all of it.
	Ramp uint8
}

// EffectiveWeight is the weight in force: the override's, or else the declaration's.
func (b Backend) EffectiveWeight() uint16 {
	if b.Override.Weighs {
		return b.Override.Weight
	}
	return b.Weight
}

// Share is the backend's present weight, override and observation included, relative to the service's others,
// in hundredths.
func (b Backend) Share() uint32 {
	weight := uint32(b.EffectiveWeight())
	switch {
	case b.Observed.Idle || b.Observed.Down:
		return 0
	case b.Observed.Ramp == 0:
		return weight * 100
	}
	return weight * uint32(b.Observed.Ramp)
}

// BackendName stands for a backend for each address that the DNS has for it.
type BackendName struct {
	DNS       string // a domain name, lower case; with a dot at its end no search list is used
	Port      uint16 // host byte order; 0 keeps the packet's destination port
	Weight    uint16 // of each backend
	Backup    bool
	CheckPort uint16 // port that is checked instead; 0: Port
	Max       uint16 // addresses of each family
}

// String returns the name with its settings, for example "web.example.org (port 8080, weight 1, max 16)".
func (n BackendName) String() string {
	text := n.DNS + " ("
	if n.Port != 0 {
		text += fmt.Sprintf("port %d, ", n.Port)
	}
	text += fmt.Sprintf("weight %d, max %d", n.Weight, n.Max)
	if n.Backup {
		text += ", backup"
	}
	if n.CheckPort != 0 {
		text += fmt.Sprintf(", health.port %d", n.CheckPort)
	}
	return text + ")"
}
