package model_test

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// TestServiceEqual changes each field of a service, future ones included, one at a time.
func TestServiceEqual(t *testing.T) {
	whole := func() *model.Service {
		s := &model.Service{}
		fill(t, "Service", reflect.ValueOf(s).Elem())
		return s
	}
	if a, b := whole(), whole(); !a.Equal(b) || !a.Equal(a) {
		t.Errorf("%+v and its copy differ", a)
	}
	count := len(leaves("Service", reflect.ValueOf(whole()).Elem()))
	if count < 40 {
		t.Errorf("only %d fields were found", count)
	}
	for i := range count {
		changed := whole()
		l := leaves("Service", reflect.ValueOf(changed).Elem())[i]
		l.change(t)
		if whole().Equal(changed) || changed.Equal(whole()) {
			t.Errorf("%s does not count", l.path)
		}
	}
}

func TestServiceEqualLists(t *testing.T) {
	a := model.Service{Backends: []model.Backend{{Weight: 1}, {Weight: 2}}}
	b := a
	b.Backends = slices.Clone(a.Backends)
	if !a.Equal(&b) {
		t.Error("lists are alike, but count as different")
	}
	for name, other := range map[string][]model.Backend{"another": {{Weight: 1}, {Weight: 3}}, "a shorter": a.Backends[:1], "no": nil} {
		if b.Backends = other; a.Equal(&b) || b.Equal(&a) {
			t.Errorf("%s list counts as the same", name)
		}
	}
	a.Backends, b.Backends = nil, []model.Backend{}
	if !a.Equal(&b) {
		t.Error("no list and an empty one count as different")
	}
}

var (
	addressType = reflect.TypeFor[netip.Addr]()
	prefixType  = reflect.TypeFor[netip.Prefix]()
)

// fill gives each list below v an element.
func fill(t *testing.T, path string, v reflect.Value) {
	t.Helper()
	switch {
	case v.Type() == addressType || v.Type() == prefixType:
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			fill(t, path+"."+v.Type().Field(i).Name, v.Field(i))
		}
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(t, path+"[0]", v.Index(0))
	case !v.Type().Comparable():
		t.Errorf("%s is a %s, which neither Equal nor this test knows", path, v.Kind())
	}
}

// leaf is a value that has no parts.
type leaf struct {
	path  string
	value reflect.Value
}

func leaves(path string, v reflect.Value) (all []leaf) {
	switch {
	case v.Type() == addressType || v.Type() == prefixType:
		return []leaf{{path, v}}
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			all = append(all, leaves(path+"."+v.Type().Field(i).Name, v.Field(i))...)
		}
		return all
	case v.Kind() == reflect.Slice:
		return leaves(path+"[0]", v.Index(0))
	}
	return []leaf{{path, v}}
}

func (l leaf) change(t *testing.T) {
	t.Helper()
	switch {
	case l.value.Type() == addressType:
		l.value.Set(reflect.ValueOf(netip.MustParseAddr("192.0.2.1")))
	case l.value.Type() == prefixType:
		l.value.Set(reflect.ValueOf(netip.MustParsePrefix("192.0.2.0/24")))
	case l.value.CanInt():
		l.value.SetInt(l.value.Int() + 1)
	case l.value.CanUint():
		l.value.SetUint(l.value.Uint() + 1)
	case l.value.Kind() == reflect.String:
		l.value.SetString(l.value.String() + "x")
	case l.value.Kind() == reflect.Bool:
		l.value.SetBool(!l.value.Bool())
	default:
		t.Errorf("%s is a %s, which this test cannot change", l.path, l.value.Kind())
	}
}
