package status

import (
	"encoding/json"
	"fmt"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Conditions are conditions as messages.
func Conditions(all []condition.Condition) []*shuntv1.Condition {
	return translateAll(all, func() *shuntv1.Condition { return &shuntv1.Condition{} })
}

// Faults are a file's faults as messages.
func Faults(all []config.Fault) []*shuntv1.Fault {
	return translateAll(all, func() *shuntv1.Fault { return &shuntv1.Fault{} })
}

// Difference is a difference as a message.
func Difference(d reconcile.Difference) *shuntv1.Difference {
	return translate(d, &shuntv1.Difference{})
}

// Settings are differences of settings as messages.
func Settings(all []model.SettingDifference) []*shuntv1.SettingDifference {
	return translateAll(all, func() *shuntv1.SettingDifference { return &shuntv1.SettingDifference{} })
}

// translateAll is translate of each, into what fresh makes.
func translateAll[F any, M proto.Message](all []F, fresh func() M) (out []M) {
	for _, from := range all {
		out = append(out, translate(from, fresh()))
	}
	return out
}

// translate goes by the names, which are the same in the JSON of both: what has no field in the
// schema is a fault of the build, and TestTranslations finds it.
func translate[M proto.Message](from any, to M) M {
	text, err := json.Marshal(from)
	if err == nil {
		err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(text, to)
	}
	if err != nil {
		panic(fmt.Sprintf("translate %T: %v", from, err)) // of the types, so every test would fail
	}
	return to
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
