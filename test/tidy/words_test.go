package tidy

import (
	"go/parser"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// nameBytesMax is the number of bytes that the kernel keeps of a program's or map's name:
// BPF_OBJ_NAME_LEN of linux/bpf.h is 16 with the terminating zero.
const nameBytesMax = 15

func TestFeaturesAreNotIfdefs(t *testing.T) { check(t, source.isBPF, conditionals) }

var (
	conditional = regexp.MustCompile(`^\s*#\s*(if|ifdef|ifndef|elif|else)\b`)
	guard       = regexp.MustCompile(`^#ifndef SHUNT_[A-Z0-9_]+_H$`)
)

// conditionals finds preprocessor conditions other than a header's include guard: code that is
// compiled out is never compiled, so it rots. Load-time constants do the same job.
func conditionals(s source) (found []violation) {
	guarded := false
	for i, line := range s.lines() {
		if !conditional.MatchString(line) {
			continue
		}
		if !guarded && strings.HasSuffix(s.path, ".h") && guard.MatchString(line) {
			guarded = true
			continue
		}
		found = append(found, s.at(i+1, "%s: use a load-time constant (lb/config.h) or a flag in a map", strings.TrimSpace(line)))
	}
	return found
}

func TestMergesAreFinished(t *testing.T) {
	check(t, func(source) bool { return true }, conflicts)
}

var conflict = regexp.MustCompile(`^(<{7}|>{7}|\|{7}) `)

// conflicts finds the marks that git leaves where both sides of a merge have changed a line.
func conflicts(s source) (found []violation) {
	for i, line := range s.lines() {
		if conflict.MatchString(line) {
			found = append(found, s.at(i+1, "a merge that nobody has finished"))
		}
	}
	return found
}

func TestNothingAsksToBeKeptEqual(t *testing.T) {
	check(t, func(s source) bool {
		return (s.isGo() || s.isC()) && !strings.HasPrefix(s.path, "test/tidy/")
	}, twiceWritten)
}

var twice = regexp.MustCompile(`(?i)\bin[ -]sync\b`)

// twiceWritten finds the comment that admits two sources of a fact.
func twiceWritten(s source) (found []violation) {
	for i, line := range s.lines() {
		if twice.MatchString(line) {
			found = append(found, s.at(i+1, "%s: a fact has one source; generate the other side", strings.TrimSpace(line)))
		}
	}
	return found
}

func TestOneWordForOneThing(t *testing.T) {
	check(t, func(s source) bool {
		return (s.isGo() || s.isC() || strings.HasSuffix(s.path, ".md")) && !strings.HasPrefix(s.path, "test/tidy/")
	}, otherWords)
}

// wordsFor names the word to write in place of one that has another meaning here, or none of
// its own.
var wordsFor = []struct {
	found   *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`(?i)\bmend(s|ed|ing)?\b`), "a person fixes a fault, and shunt repairs its state"},
	{regexp.MustCompile(`(?i)\binterface(_| |')s? ?slots?\b`), "a slot is an element of a Maglev table: an interface has an index"},
	{regexp.MustCompile(`(^|[.;:!] )Whoever [a-z]`), "say which program, person or host it is"},
}

func otherWords(s source) (found []violation) {
	for i, line := range s.lines() {
		for _, w := range wordsFor {
			if m := w.found.FindString(line); m != "" {
				found = append(found, s.at(i+1, "%q: %s", strings.TrimSpace(m), w.instead))
			}
		}
	}
	return found
}

func TestCommentsNameTheirNouns(t *testing.T) {
	check(t, func(s source) bool { return s.isGo() && !strings.HasPrefix(s.path, "test/tidy/") }, vagueWords)
}

// vague matches words that stand for a noun that the reader has to guess.
var vague = regexp.MustCompile(`//.*\b((is|are) what|[Ww]hoever|those that)\b`)

func vagueWords(s source) (found []violation) {
	for i, line := range s.lines() {
		if m := vague.FindStringSubmatch(line); m != nil {
			found = append(found, s.at(i+1, "%q: name the thing, the program or the person", m[1]))
		}
	}
	return found
}

func TestKernelNamesFit(t *testing.T) { check(t, source.isBPF, kernelNames) }

var (
	mapName     = regexp.MustCompile(`^}\s*(\w+)\s+SEC\("\.maps"\)`)
	section     = regexp.MustCompile(`^SEC\("([^"]+)"\)`)
	programName = regexp.MustCompile(`^(?:static )?(?:int|long)\s+(?:BPF_PROG\()?(\w+)`)
)

// kernelNames finds maps and programs whose names the kernel would cut, or that lack the
// prefix sh_.
func kernelNames(s source) (found []violation) {
	name := func(line int, name string) {
		if len(name) > nameBytesMax {
			found = append(found, s.at(line, "%s has %d characters, the kernel keeps %d", name, len(name), nameBytesMax))
		}
		if !strings.HasPrefix(name, "sh_") {
			found = append(found, s.at(line, "%s: names that the kernel shows begin with sh_", name))
		}
	}
	lines := s.lines()
	for i, line := range lines {
		if m := mapName.FindStringSubmatch(line); m != nil {
			name(i+1, m[1])
		}
		if m := section.FindStringSubmatch(line); m != nil && i+1 < len(lines) {
			if p := programName.FindStringSubmatch(lines[i+1]); p != nil {
				name(i+2, p[1])
			}
		}
	}
	return found
}

func TestMapsAreExplained(t *testing.T) { check(t, source.isBPF, mapComments) }

// mapComments finds map definitions without a comment right above them.
func mapComments(s source) (found []violation) {
	begin := 0
	lines := s.lines()
	for i, line := range lines {
		if line == "struct {" {
			begin = i
		}
		if m := mapName.FindStringSubmatch(line); m != nil {
			if begin == 0 || !strings.HasSuffix(lines[begin-1], "*/") {
				found = append(found, s.at(begin+1, "map %s: say above it what it holds, who writes, who reads, what happens when it is full and at an upgrade", m[1]))
			}
		}
	}
	return found
}

func TestBPFSaysItsLicence(t *testing.T) {
	check(t, func(s source) bool { return s.isC() && !strings.Contains(s.path, "testdata") }, licenceLine)
}

const licence = "SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause"

func licenceLine(s source) []violation {
	if !strings.Contains(s.lines()[0], licence) {
		return []violation{s.at(1, "the first line must be a comment with %q", licence)}
	}
	return nil
}

func TestPackagesSayWhatTheyAre(t *testing.T) {
	documented := map[string]bool{}
	first := map[string]source{}
	for _, s := range tree(t) {
		if !s.isGo() {
			continue
		}
		dir := path.Dir(s.path)
		if _, known := first[dir]; !known {
			first[dir] = s
		}
		documented[dir] = documented[dir] || hasPackageDoc(t, s)
	}
	var found []violation
	for dir, s := range first {
		if !documented[dir] {
			found = append(found, s.at(1, "no file of package %s says what the package is", dir))
		}
		if name := path.Base(dir); slices.Contains([]string{"util", "utils", "common", "helper", "helpers", "manager", "misc"}, name) {
			found = append(found, s.at(1, "%s says nothing about what is in the package", name))
		}
	}
	report(t, found)
}

func hasPackageDoc(t *testing.T, s source) bool {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), s.path, s.text, parser.PackageClauseOnly|parser.ParseComments)
	if err != nil {
		t.Errorf("%s: %v", s.path, err)
		return true
	}
	return file.Doc != nil && len(strings.Fields(file.Doc.Text())) >= 5
}

func TestWordRulesFindWhatTheyLookFor(t *testing.T) {
	finds(t, conditionals, source{"bpf/lb/a.h", "#ifndef SHUNT_A_H\n#define SHUNT_A_H\n#ifdef IPV6\n#else\n#endif\n#endif\n"}, 3, 4)
	finds(t, conditionals, source{"bpf/lb/a.h", "#ifndef SHUNT_A_H\n#define SHUNT_A_H\n#endif\n"})
	finds(t, conditionals, source{"bpf/a.c", "#ifndef SHUNT_A_H\n#endif\n"}, 1)
	finds(t, twiceWritten, source{"a.go", "// must be in " + "sync with the C side\n"}, 1)
	finds(t, twiceWritten, source{"a.go", "// in synchronous code\n"})
	finds(t, otherWords, source{"a.md", "Mend it.\nThe interface's slot.\nIt goes. Whoever waits, waits.\n"}, 1, 2, 3)
	finds(t, otherWords, source{"a.md", "Amendments for whoever reads slots of an interface.\n"})
	finds(t, vagueWords, source{"a.go", "// Options are " + "what New needs.\nvar x = 1 // Who" + "ever reads\n"}, 1, 2)
	finds(t, vagueWords, source{"a.go", "/" + "/ It is unclear what it does.\nvar x = \"is what\"\n"})
	finds(t, conflicts, source{"docs/a.md", "a\n" + strings.Repeat("<", 7) + " HEAD\nb\n" + strings.Repeat("=", 7) + "\n" + strings.Repeat(">", 7) + " other\n"}, 2, 5)
	finds(t, kernelNames, source{"bpf/a.c", "} sh_a_map_with_a_long_name SEC(\".maps\");\n"}, 1)
	finds(t, kernelNames, source{"bpf/a.c", "SEC(\"xdp\")\nint other(struct xdp_md *ctx)\n"}, 2)
	finds(t, kernelNames, source{"bpf/a.c", "SEC(\"xdp\")\nint sh_xdp(struct xdp_md *ctx)\n} sh_flows SEC(\".maps\");\n"})
	finds(t, mapComments, source{"bpf/a.c", "\nstruct {\n} sh_a SEC(\".maps\");\n"}, 2)
	finds(t, mapComments, source{"bpf/a.c", "/* What it holds. */\nstruct {\n} sh_a SEC(\".maps\");\n"})
	finds(t, licenceLine, source{"bpf/a.c", "int x;\n"}, 1)
	finds(t, licenceLine, source{"bpf/a.c", "// " + licence + "\n"})
	if hasPackageDoc(t, source{"a.go", "package a\n"}) || !hasPackageDoc(t, source{"a.go", "// Package a is what this example is about.\npackage a\n"}) {
		t.Error("hasPackageDoc does not tell a package with a doc from one without")
	}
}
