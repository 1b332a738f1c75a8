package file

import (
	"reflect"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
)

// TestInsteadOfWhatIsNotSupported: the refusal of each unsupported key that is known by name offers an alternative.
func TestInsteadOfWhatIsNotSupported(t *testing.T) {
	known := 0
	var visit func(mapping reflect.Type, path string)
	visit = func(mapping reflect.Type, path string) {
		for _, f := range config.FieldsOf(mapping) {
			if !f.Supported() {
				known++
				if f.Instead == "" {
					t.Errorf("%s%s does not say what to do instead", path, f.Name)
				}
				continue
			}
			for _, l := range f.Later {
				known++
				if l.Instead == "" {
					t.Errorf("%s%s: %s does not say what to do instead", path, f.Name, l.Word)
				}
			}
			if element, _, ok := config.ElementOf(f.Type); ok {
				visit(element, path+f.Name+".")
			}
		}
	}
	visit(reflect.TypeFor[document](), "")
	if known == 0 {
		t.Error("nothing is known by name")
	}
}
