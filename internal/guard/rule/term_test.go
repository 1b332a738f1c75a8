package rule

import (
	"reflect"
	"testing"
)

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
