package status

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/message"
	"github.com/shunt-lb/shunt/internal/value"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// TestTranslations fills every field, and requires that the schema has each, under its name in JSON, and no other, and that
// the message has the same values.
func TestTranslations(t *testing.T) {
	difference, health := filled[reconcile.Difference](t), filled[health.Status](t)
	setting, raised, fault := filled[value.SettingDifference](t), filled[condition.Condition](t), filled[config.Fault](t)
	for _, c := range []struct {
		from     any
		to, want proto.Message
	}{
		{difference, Difference(difference), &shuntv1.Difference{}},
		{difference.Cuts[0], Cuts(difference)[0], &shuntv1.Cut{}},
		{setting, message.Settings([]value.SettingDifference{setting})[0], &shuntv1.SettingDifference{}},
		{raised, message.Conditions([]condition.Condition{raised})[0], &shuntv1.Condition{}},
		{fault, message.Faults([]config.Fault{fault})[0], &shuntv1.Fault{}},
		{health, backendHealth(health), &shuntv1.BackendHealth{}},
	} {
		text, err := json.Marshal(c.from)
		if err != nil {
			t.Fatal(err)
		}
		if err := protojson.Unmarshal(text, c.want); err != nil {
			t.Errorf("%T has what api/v1 has not: %v\n%s", c.from, err, text)
			continue
		}
		requireFull(t, c.want.ProtoReflect())
		if !proto.Equal(c.to, c.want) {
			t.Errorf("%T is translated to\n%v, want\n%v", c.from, c.to, c.want)
		}
	}
}

// filled returns a value whose exported fields all differ from their zero values.
func filled[T any](t *testing.T) (v T) {
	fill(t, reflect.ValueOf(&v).Elem())
	return v
}

// fill gives every field a value that is not its zero value.
func fill(t *testing.T, v reflect.Value) {
	switch v.Interface().(type) {
	case netip.Addr:
		v.Set(reflect.ValueOf(netip.MustParseAddr("192.0.2.1")))
		return
	case time.Time:
		v.Set(reflect.ValueOf(time.Unix(1, 0).UTC()))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(t, v.Field(i))
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(t, v.Index(0))
	case reflect.String:
		v.SetString("word")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int:
		v.SetInt(7)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(7)
	default:
		t.Fatalf("no value for a %s", v.Type())
	}
}

// requireFull finds fields of the schema that nothing fills.
func requireFull(t *testing.T, m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		switch {
		case m.Descriptor().FullName().Parent() == "google.protobuf":
		case !m.Has(f):
			t.Errorf("nothing fills %s", f.FullName())
		case f.IsList() && f.Message() != nil:
			requireFull(t, m.Get(f).List().Get(0).Message())
		case f.Message() != nil:
			requireFull(t, m.Get(f).Message())
		}
	}
}
