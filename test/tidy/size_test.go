package tidy

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

// Limits of the text that one reader can keep in mind; they are this project's choice.
const (
	bpfFunctionLinesMax = 70
	goFunctionLinesMax  = 100
	fileLinesMax        = 800
	headerLinesMax      = 1550 // the client in C is one file, for copying, and clang-format gives it many lines
)

func TestFilesAreShort(t *testing.T) {
	check(t, func(s source) bool { return s.isGo() || s.isC() }, fileLength)
}

func fileLength(s source) []violation {
	limit := fileLinesMax
	if s.path == "udp/c/shunt_udp.h" {
		limit = headerLinesMax
	}
	if n := len(s.lines()); n > limit {
		return []violation{s.at(n, "the file has %d lines, at most %d are allowed", n, limit)}
	}
	return nil
}

func TestGoFunctionsAreShort(t *testing.T) { check(t, source.isGo, goFunctionLength) }

func goFunctionLength(s source) (found []violation) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, s.path, s.text, parser.SkipObjectResolution)
	if err != nil {
		return []violation{s.at(1, "not valid Go: %v", err)}
	}
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		first, last := files.Position(f.Pos()).Line, files.Position(f.End()).Line
		if n := last - first + 1; n > goFunctionLinesMax {
			found = append(found, s.at(first, "func %s has %d lines, at most %d are allowed", f.Name.Name, n, goFunctionLinesMax))
		}
	}
	return found
}

func TestBPFFunctionsAreShort(t *testing.T) { check(t, source.isBPF, bpfFunctionLength) }

// bpfFunctionLength relies on clang-format's output: only the braces of a function's body
// stand alone on a line at its start.
func bpfFunctionLength(s source) (found []violation) {
	begin := 0
	for i, line := range s.lines() {
		switch {
		case line == "{":
			begin = i + 1
		case line == "}" && begin > 0:
			if n := i + 1 - begin + 1; n > bpfFunctionLinesMax {
				found = append(found, s.at(begin, "the function has %d lines, at most %d are allowed", n, bpfFunctionLinesMax))
			}
			begin = 0
		}
	}
	return found
}

func TestSizeRulesFindWhatTheyLookFor(t *testing.T) {
	long := strings.Repeat("\tx++;\n", bpfFunctionLinesMax)
	finds(t, bpfFunctionLength, source{"bpf/a.c", "int f(void)\n{\n" + long + "}\n"}, 2)
	finds(t, bpfFunctionLength, source{"bpf/a.c", "int f(void)\n{\n}\nint g(void)\n{\n}\n"})
	finds(t, goFunctionLength, source{"a.go", "package a\nfunc f() {\n" + strings.Repeat("\n", goFunctionLinesMax) + "}\n"}, 2)
	finds(t, goFunctionLength, source{"a.go", "package a\nfunc f() {\n}\n"})
	finds(t, fileLength, source{"a.go", strings.Repeat("\n", fileLinesMax+1)}, fileLinesMax+1)
	finds(t, fileLength, source{"a.go", strings.Repeat("\n", fileLinesMax)})
}

// finds fails unless the rule finds exactly these lines of the file.
func finds(t *testing.T, rule func(source) []violation, s source, lines ...int) {
	t.Helper()
	found := rule(s)
	if len(found) != len(lines) {
		t.Errorf("found %v, want %d violations, in:\n%.300s", found, len(lines), s.text)
		return
	}
	for i, v := range found {
		if v.line != lines[i] {
			t.Errorf("found %v, want line %d, in:\n%.300s", v, lines[i], s.text)
		}
	}
}
