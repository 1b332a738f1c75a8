// Package message translates what the daemon knows into messages of the API.
package message

import (
	"encoding/json"
	"fmt"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/value"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// Conditions are conditions as messages.
func Conditions(all []condition.Condition) []*shuntv1.Condition {
	return translateAll(all, func() *shuntv1.Condition { return &shuntv1.Condition{} })
}

// Faults are a file's faults as messages.
func Faults(all []config.Fault) []*shuntv1.Fault {
	return translateAll(all, func() *shuntv1.Fault { return &shuntv1.Fault{} })
}

// Settings are differences of settings as messages.
func Settings(all []value.SettingDifference) []*shuntv1.SettingDifference {
	return translateAll(all, func() *shuntv1.SettingDifference { return &shuntv1.SettingDifference{} })
}

// translateAll is Translate of each, into what fresh makes.
func translateAll[F any, M proto.Message](all []F, fresh func() M) (out []M) {
	for _, from := range all {
		out = append(out, Translate(from, fresh()))
	}
	return out
}

// Translate goes by the names, which are the same in the JSON of both. A value that has no field in
// the schema is left out; the tests of who translates find it.
func Translate[M proto.Message](from any, to M) M {
	text, err := json.Marshal(from)
	if err == nil {
		err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(text, to)
	}
	if err != nil {
		panic(fmt.Sprintf("translate %T: %v", from, err)) // of the types, so every test would fail
	}
	return to
}
