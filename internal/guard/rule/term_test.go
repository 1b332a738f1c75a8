package rule

import (
	"reflect"
	"slices"
	"testing"
)

// FuzzTerms takes conditions apart: where every part is understood, all of them hold if and only if the condition does.
func FuzzTerms(f *testing.F) {
	for _, r := range Builtin() {
		f.Add(r.If)
	}
	for _, source := range []string{`!(!(process.program in ["/usr/bin/bash"])) && "bash" != process.comm`, `file.write && (!file.write || true)`, `true && ((file.path == "/tmp/x.sh"))`, `!!process.deleted`} {
		f.Add(source)
	}
	f.Fuzz(func(t *testing.T, source string) {
		x, err := Compile(source, Types)
		if err != nil {
			return
		}
		for _, e := range []*Event{sample(), {}, {Write: true, Deleted: true, Path: "/tmp/x.sh"}} {
			holds := true
			for _, term := range Terms(source) {
				i := slices.IndexFunc(Fields, func(f Field) bool { return f.Name == term.Field })
				if i < 0 {
					return // it is not understood, and no caller relies on it
				}
				switch value := Fields[i].Value(e).(type) {
				case bool:
					holds = holds && value != term.Not
				case string:
					holds = holds && slices.Contains(term.Values, value) != term.Not
				default:
					t.Fatalf("%q: %+v", source, term)
				}
			}
			if x.Holds(e) != holds {
				t.Fatalf("%q is %v, and its terms %+v are %v", source, !holds, Terms(source), holds)
			}
		}
	})
}

func TestTerms(t *testing.T) {
	one := func(column int, source, field string, not bool, values ...string) Term {
		return Term{Column: column, Source: source, Field: field, Values: values, Not: not}
	}
	for source, want := range map[string][]Term{
		`true`:                                {},
		`(true && (true))`:                    {},
		`process.program == "/a"`:             {one(1, `process.program == "/a"`, "process.program", false, "/a")},
		`"/a" != process.program`:             {one(1, `"/a" != process.program`, "process.program", true, "/a")},
		`!(process.program != "/a")`:          {one(1, `!(process.program != "/a")`, "process.program", false, "/a")},
		`!!(process.program in ["/a", "/b"])`: {one(1, `!!(process.program in ["/a", "/b"])`, "process.program", false, "/a", "/b")},
		`file.write && (file.path == "a)" && !file.write)`: {one(1, `file.write`, "file.write", false), one(16, `file.path == "a)"`, "file.path", false, "a)"),
			one(37, `!file.write`, "file.write", true)},
		`file.write || file.path == "/a"`:              {one(1, `file.write || file.path == "/a"`, "", false)},
		`(file.write) && (file.write || file.write)`:   {one(2, `file.write`, "file.write", false), one(18, `file.write || file.write`, "", false)},
		`!(file.write && file.write)`:                  {one(1, `!(file.write && file.write)`, "", true)},
		`!file.write == true`:                          {one(1, `!file.write == true`, "", false)},
		`file.path.startsWith("/a")`:                   {one(1, `file.path.startsWith("/a")`, "", false)},
		`process.args.exists(a, a == "x" && a != "y")`: {one(1, `process.args.exists(a, a == "x" && a != "y")`, "", false)},
		`file.path.matches("^/a$")`:                    {{Column: 1, Source: `file.path.matches("^/a$")`, Of: "file.path", Pattern: "^/a$"}},
		`"/a" in process.args`:                         {one(1, `"/a" in process.args`, "", false)},
		`process.program in []`:                        {one(1, `process.program in []`, "", false)},
		`process.uid == 0`:                             {one(1, `process.uid == 0`, "", false)},
		`process.program == process.comm`:              {one(1, `process.program == process.comm`, "", false)},
		`false`:                                        {one(1, `false`, "", false)},
	} {
		if _, err := Compile(source, Types); err != nil {
			t.Errorf("%s: %v", source, err)
		}
		if got := Terms(source); len(got)+len(want) > 0 && !reflect.DeepEqual(got, want) {
			t.Errorf("%s\nhas terms %+v\nwant      %+v", source, got, want)
		}
	}
}
