package state

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// TestCloneSharesNothing fills every field of a configuration, future ones included, and
// looks for memory that the copy shares with it.
func TestCloneSharesNothing(t *testing.T) {
	var cfg model.Config
	fill(t, "Config", reflect.ValueOf(&cfg).Elem())
	copied := model.Config{Node: cloneNode(cfg.Node)}
	for _, s := range cfg.Services {
		copied.Services = append(copied.Services, cloneService(s))
	}
	if !reflect.DeepEqual(cfg, copied) {
		t.Errorf("the copy is %+v, of %+v", copied, cfg)
	}
	found, seen := shared("Config", reflect.ValueOf(cfg), reflect.ValueOf(copied))
	for _, path := range found {
		t.Errorf("%s is the caller's, too: copy it in cloneNode or cloneService", path)
	}
	if seen < 8 {
		t.Errorf("only %d places were compared", seen)
	}
	if found, _ := shared("Config", reflect.ValueOf(cfg), reflect.ValueOf(cfg)); len(found) == 0 {
		t.Error("a configuration shares nothing with itself")
	}
}

// isValue reports whether an assignment copies a type completely, although reflection cannot see that.
func isValue(t reflect.Type) bool {
	return t == reflect.TypeFor[netip.Addr]() || t == reflect.TypeFor[netip.Prefix]()
}

// fill gives each slice and map below v an element, and each pointer something to point to.
func fill(t *testing.T, path string, v reflect.Value) {
	t.Helper()
	if isValue(v.Type()) {
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, path+"."+v.Type().Field(i).Name, v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(t, path+"[0]", v.Index(0))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, path, v.Elem())
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, path+"[key]", key)
		fill(t, path+"[0]", value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Interface, reflect.Func, reflect.Chan, reflect.UnsafePointer:
		t.Errorf("%s is a %s: nobody can tell whether two configurations are the same", path, v.Kind())
	}
}

// shared returns the paths of slices, maps and pointers that a and b, which are alike, have in common,
// and the number that were compared.
func shared(path string, a, b reflect.Value) (found []string, seen int) {
	below := func(path string, a, b reflect.Value) {
		f, n := shared(path, a, b)
		found, seen = append(found, f...), seen+n
	}
	if isValue(a.Type()) {
		return nil, 0
	}
	switch a.Kind() {
	case reflect.Slice, reflect.Map, reflect.Pointer:
		seen++
		if a.Pointer() == b.Pointer() {
			found = append(found, path)
		}
	}
	switch a.Kind() {
	case reflect.Struct:
		for i := range a.NumField() {
			below(path+"."+a.Type().Field(i).Name, a.Field(i), b.Field(i))
		}
	case reflect.Slice:
		for i := range a.Len() {
			below(fmt.Sprintf("%s[%d]", path, i), a.Index(i), b.Index(i))
		}
	case reflect.Pointer:
		below(path, a.Elem(), b.Elem())
	case reflect.Map:
		for _, key := range a.MapKeys() {
			below(fmt.Sprintf("%s[%v]", path, key), a.MapIndex(key), b.MapIndex(key))
		}
	}
	return found, seen
}
