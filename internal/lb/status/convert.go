package status

import (
	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/message"
	"google.golang.org/protobuf/proto"
)

// Difference converts a difference to a message, without its cuts.
func Difference(d reconcile.Difference) *shuntv1.Difference {
	return &shuntv1.Difference{Services: message.Each(d.Services, serviceDifference), Addresses: message.Each(d.Addresses, addressDifference),
		Repairs: uint32(d.Repairs)}
}

func serviceDifference(d reconcile.ServiceDifference) *shuntv1.ServiceDifference {
	m := &shuntv1.ServiceDifference{Name: d.Name, Change: string(d.Change), Attributes: message.Each(d.Attributes, attributeDifference),
		FrontendsAdded: d.FrontendsAdded, FrontendsRemoved: d.FrontendsRemoved, BackendsAdded: d.BackendsAdded, BackendsRemoved: d.BackendsRemoved,
		Weights: message.Each(d.Weights, weightDifference), Tables: message.Each(d.Tables, tableDifference), States: message.Each(d.States, stateDifference),
		BackendChanges: message.Each(d.BackendChanges, backendDifference)}
	if f := d.Filters; f != nil {
		m.Filters = &shuntv1.FilterDifference{AllowFromAdded: uint32(f.AllowAdded), AllowFromRemoved: uint32(f.AllowRemoved),
			DenyFromAdded: uint32(f.DenyAdded), DenyFromRemoved: uint32(f.DenyRemoved), OthersIpv4: f.Others4, OthersIpv6: f.Others6}
	}
	return m
}

func attributeDifference(d reconcile.AttributeDifference) *shuntv1.AttributeDifference {
	return &shuntv1.AttributeDifference{Name: d.Name, Before: d.Before, After: d.After}
}

func backendDifference(d reconcile.BackendDifference) *shuntv1.BackendDifference {
	return &shuntv1.BackendDifference{Backend: d.Backend, Attributes: message.Each(d.Attributes, attributeDifference)}
}

func weightDifference(d reconcile.WeightDifference) *shuntv1.WeightDifference {
	return &shuntv1.WeightDifference{Backend: d.Backend, Before: uint32(d.Before), After: uint32(d.After)}
}

func stateDifference(d reconcile.StateDifference) *shuntv1.StateDifference {
	return &shuntv1.StateDifference{Backend: d.Backend, Before: d.Before, After: d.After}
}

func tableDifference(d reconcile.TableDifference) *shuntv1.TableDifference {
	return &shuntv1.TableDifference{Family: d.Family, SlotsBefore: d.SlotsBefore, Slots: d.Slots, SlotsMoved: d.SlotsMoved}
}

func addressDifference(d reconcile.AddressDifference) *shuntv1.AddressDifference {
	return &shuntv1.AddressDifference{Address: d.Address.String(), Change: string(d.Change), Before: d.Before, After: d.After}
}

// Cuts converts the flows that end with a difference to messages.
func Cuts(d reconcile.Difference) []*shuntv1.Cut {
	return message.Each(d.Cuts, func(c reconcile.Cut) *shuntv1.Cut {
		return &shuntv1.Cut{Service: c.Service, Backend: c.Backend, OpenFlows: c.OpenFlows, Text: c.Text}
	})
}

// backendHealth converts the health of a backend in a service to a message.
func backendHealth(s health.Status) *shuntv1.BackendHealth {
	return &shuntv1.BackendHealth{Service: s.Service, Backend: s.Backend, Check: string(s.Check), State: string(s.State), Since: message.Time(s.Since),
		LastError: s.LastError, KeptDownUntil: message.Time(s.RestsUntil), Adopted: s.Adopted, Override: string(s.Override), Changes: s.Changes}
}

// HealthChange converts a backend's change of state to a message.
func HealthChange(t health.Transition) *shuntv1.HealthChange {
	return &shuntv1.HealthChange{Service: t.Service, Pool: t.Pool, Backend: t.Backend.String(), Name: t.Name, From: string(t.From), To: string(t.To),
		Cause: t.Cause, Results: t.Results, KeptDownUntil: message.Time(t.RestsUntil)}
}

// Overrides converts overrides to messages.
func Overrides(all []state.Override) []*shuntv1.Override {
	var out []*shuntv1.Override
	for _, o := range all {
		m := &shuntv1.Override{Backend: o.Backend.String(), Kind: string(o.Kind), Since: message.Time(o.Since), Deadline: message.Time(o.Deadline),
			By: o.By, Uid: o.UID, Client: o.Client}
		switch o.Kind {
		case state.KindWeight:
			m.Weight = proto.Uint32(uint32(o.Weight))
		case state.KindHealth:
			m.Health = proto.String(string(o.Health))
		}
		out = append(out, m)
	}
	return out
}
