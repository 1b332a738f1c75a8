package rule

import (
	"path"
	"reflect"
	"regexp"
	"slices"
	"testing"
)

func TestPatternNames(t *testing.T) {
	files := func(names ...string) Names { return Names{Files: names} }
	anyName := Names{Any: true}
	for pattern, want := range map[string]Names{
		`^/etc/g?shadow-?$`:                 files("gshadow-", "shadow-", "gshadow", "shadow"),
		`^/etc/(passwd|group)[-+]?$`:        files("passwd+", "group+", "passwd-", "group-", "passwd", "group"),
		`^/proc/[0-9]+/(task/[0-9]+/)?mem$`: files("mem"),
		`/\.ssh/id_[a-z0-9_]+$`:             {Folders: []string{".ssh"}},
		`^/a/.*/b$`:                         files("b"),
		`/a$|/b$`:                           files("a", "b"),
		`(/a|/b)$`:                          files("a", "b"),
		`/a`:                                anyName, // anything may follow
		`/a$|/b`:                            anyName,
		`a$`:                                anyName, // and anything may be before
		`^/etc/sudoers(\.d/.*)?$`:           anyName,
		`^/a/([^/]+/)?[^/]+$`:               {Folders: []string{"a"}, Above: []string{"a"}},
		`/[^/]+/[^/]+/[^/]+$`:               anyName,
		`^/dev/(sd[a-z]+|dm-[0-9]+)$`:       {Folders: []string{"dev"}},
		`(?i)/shadow$`:                      anyName,
		`/[^/]+/x$`:                         files("x"),
		`/x/[^a]+$`:                         anyName, // it may have a slash
		`^/$`:                               anyName,
		`(?m)/shadow$`:                      anyName,
		`/a{2,3}$`:                          files("aa", "aaa"),
		``:                                  anyName,
	} {
		got := patternNames(pattern)
		slices.Sort(got.Files)
		slices.Sort(want.Files)
		got.Folders = slices.Compact(got.Folders)
		if got.Files = slices.Compact(got.Files); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", pattern, got, want)
		}
	}
}

// A pattern never matches a path whose names are not among its own.
func FuzzPatternNames(f *testing.F) {
	for _, path := range []string{"/etc/shadow", "/root/.ssh/id_rsa", "/proc/1/task/2/mem", "/dev/sda1", "/a/b\n/c", "/x/aa"} {
		for _, r := range Builtin() {
			for _, t := range Terms(r.If) {
				f.Add(t.Pattern, path)
			}
		}
		f.Add(`(?s)/a{1,2}(b|/c)*[d-f]?$`, path)
	}
	f.Fuzz(func(t *testing.T, pattern, name string) {
		name = path.Clean("/" + name)
		names := patternNames(pattern)
		re, err := regexp.Compile(pattern)
		if names.Any || name == "/" || err != nil || !re.MatchString(name) {
			return
		}
		if !slices.Contains(names.Files, path.Base(name)) && !slices.Contains(names.Folders, path.Base(path.Dir(name))) &&
			!slices.Contains(names.Above, path.Base(path.Dir(path.Dir(name)))) {
			t.Errorf("%q matches %q, and its names are %+v", pattern, name, names)
		}
	})
}

func TestOpenNames(t *testing.T) {
	of := func(conditions ...string) (reads, writes Names) {
		var rules []Rule
		for _, c := range conditions {
			rules = append(rules, Rule{On: []string{Open}, If: c})
		}
		return OpenNames(append(rules, Rule{On: []string{Exec}, If: "true"}))
	}
	for _, c := range []struct {
		conditions    []string
		reads, writes Names
	}{
		{nil, Names{}, Names{}},
		{[]string{`file.path == "/etc/shadow"`}, Names{Files: []string{"shadow"}}, Names{Files: []string{"shadow"}}},
		{[]string{`!file.write && file.path in ["/a/b", "/c"]`, `file.write && process.uid == 0`}, Names{Files: []string{"b", "c"}}, Names{Any: true}},
		{[]string{`file.path != "/a"`}, Names{Any: true}, Names{Any: true}},
		{[]string{`file.name == "x" && file.write`}, Names{}, Names{Files: []string{"x"}}},
		{[]string{`file.name == "x" || file.write`}, Names{Any: true}, Names{Any: true}},
		{[]string{`!file.path.matches("/a$")`}, Names{Any: true}, Names{Any: true}},
	} {
		if reads, writes := of(c.conditions...); !reflect.DeepEqual(reads, c.reads) || !reflect.DeepEqual(writes, c.writes) {
			t.Errorf("%q: reads %+v, writes %+v", c.conditions, reads, writes)
		}
	}
	if reads, writes := OpenNames(Builtin()); reads.Any || writes.Any || !slices.Contains(writes.Above, "system") || !slices.Contains(reads.Files, "shadow") || !slices.Contains(reads.Folders, ".ssh") {
		t.Errorf("of the built-in rules, opens are about %+v to read and %+v to write", reads, writes)
	}
}
