package status

import (
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/message"
	"github.com/shunt-lb/shunt/internal/value"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Every field of the schema is filled from values whose every field is.
func TestTranslations(t *testing.T) {
	for _, m := range []proto.Message{
		Difference(filled[reconcile.Difference](t)),
		Cuts(filled[reconcile.Difference](t))[0],
		backendHealth(filled[health.Status](t)),
		message.Settings([]value.SettingDifference{filled[value.SettingDifference](t)})[0],
		message.Conditions([]condition.Condition{filled[condition.Condition](t)})[0],
		message.Faults([]config.Fault{filled[config.Fault](t)})[0],
	} {
		requireFull(t, m.ProtoReflect())
	}
}

// filled is a value whose exported fields all differ from their zero values.
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
