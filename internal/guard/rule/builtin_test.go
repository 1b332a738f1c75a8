package rule

import (
	"slices"
	"strings"
	"testing"
)

func TestBuiltinRulesAreSound(t *testing.T) {
	all := Builtin()
	if len(all) < 25 {
		t.Errorf("%d rules", len(all))
	}
	names := map[string]bool{}
	for _, r := range all {
		if names[r.Name] {
			t.Errorf("%s is there twice", r.Name)
		}
		names[r.Name] = true
		if r.Doc == "" || r.Tell == "" || !slices.Contains(Severities, r.Severity) || len(r.Mitre) == 0 {
			t.Errorf("%s lacks something: %+v", r.Name, r)
		}
		for _, id := range r.Mitre {
			if Technique(id) == "" {
				t.Errorf("%s: %s is no technique", r.Name, id)
			}
		}
	}
}

func TestTechniques(t *testing.T) {
	if Technique("T1059.004") != "Unix Shell" || Technique("T9999") != "" || Technique("t1059") != "" {
		t.Error("the list is wrong")
	}
	for id, want := range map[string]string{"1059": "write it as T1059", "T1059.099": "T1059.004", "T9999": "attack.mitre.org"} {
		if got := SuggestTechnique(id); !strings.Contains(got, want) {
			t.Errorf("%s: %s", id, got)
		}
	}
	for id := range techniques {
		if !techniqueForm.MatchString(id) {
			t.Errorf("%s has not the form of an ID", id)
		}
		if whole, _, _ := strings.Cut(id, "."); techniques[whole] == "" {
			t.Errorf("%s has no technique above it", id)
		}
	}
}

// Each field has a value of its kind of every event, also of an empty one.
func TestFieldsHaveValues(t *testing.T) {
	for _, e := range []*Event{sample(), {}} {
		for _, f := range Fields {
			is := false
			switch f.Value(e).(type) {
			case bool:
				is = f.kind == boolean
			case int64:
				is = f.kind == integer
			case string:
				is = f.kind == text
			case []string:
				is = f.kind == texts
			case []Process:
				is = f.kind == processes
			}
			if !is {
				t.Errorf("%s is %T, and no %s", f.Name, f.Value(e), f.Kind)
			}
		}
	}
	if v := ProcessValues(Process{PID: 7, Comm: "x"}); v["pid"] != int64(7) || v["name"] != "x" {
		t.Error(v)
	}
}
