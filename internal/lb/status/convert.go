package status

import (
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/message"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Difference is a difference as a message.
func Difference(d reconcile.Difference) *shuntv1.Difference {
	return message.Translate(d, &shuntv1.Difference{})
}

// Cuts are the flows that end with a difference, as messages.
func Cuts(d reconcile.Difference) (all []*shuntv1.Cut) {
	for _, c := range d.Cuts {
		all = append(all, message.Translate(c, &shuntv1.Cut{}))
	}
	return all
}

// HealthChange is another state of a backend as a message.
func HealthChange(t health.Transition) *shuntv1.HealthChange {
	return &shuntv1.HealthChange{Service: t.Service, Pool: t.Pool, Backend: t.Backend.String(), Name: t.Name, From: string(t.From), To: string(t.To),
		Cause: t.Cause, Results: t.Results, KeptDownUntil: timestamp(t.RestsUntil)}
}

// Overrides are overrides as messages.
func Overrides(all []state.Override) []*shuntv1.Override {
	var out []*shuntv1.Override
	for _, o := range all {
		m := &shuntv1.Override{Backend: o.Backend.String(), Kind: string(o.Kind), Since: timestamp(o.Since), Deadline: timestamp(o.Deadline),
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

// timestamp is absent for the zero time.
func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
