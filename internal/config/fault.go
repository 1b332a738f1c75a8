package config

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Severity says what a fault means for the configuration that has it.
type Severity string

// The severities. The values are the words used in output.
const (
	// SeverityError makes the configuration unusable.
	SeverityError Severity = "error"
	// SeverityWarning leaves it usable, with an effect its author may not want.
	SeverityWarning Severity = "warning"
)

// Fault is one thing that is wrong with a configuration, and where.
type Fault struct {
	File       string   `json:"file"`             // as the caller named it, joined with the file's name in a directory
	Line       int      `json:"line,omitempty"`   // from 1; 0 when the fault is the file's as a whole
	Column     int      `json:"column,omitempty"` // in characters, from 1
	Severity   Severity `json:"severity"`
	Path       string   `json:"path,omitempty"` // the place in the structure, such as services[0].port; indices count in this file
	Text       string   `json:"text,omitempty"` // the offending text
	Message    string   `json:"message"`
	Suggestion string   `json:"suggestion,omitempty"`

	line string // the whole line, for Render
}

// String is the fault on one line:
//
//	shunt.yaml:12:9: error: services[0].portt: unknown key "portt"; did you mean "port"?
func (f Fault) String() string {
	var b strings.Builder
	b.WriteString(printable(f.File))
	if f.Line > 0 {
		fmt.Fprintf(&b, ":%d:%d", f.Line, f.Column)
	}
	fmt.Fprintf(&b, ": %s: ", f.Severity)
	if f.Path != "" {
		b.WriteString(printable(f.Path) + ": ")
	}
	b.WriteString(printable(f.Message))
	if f.Suggestion != "" {
		b.WriteString("; " + printable(f.Suggestion))
	}
	return b.String()
}

// HasErrors reports whether one of the faults makes the configuration unusable.
func HasErrors(faults []Fault) bool {
	return slices.ContainsFunc(faults, func(f Fault) bool { return f.Severity == SeverityError })
}

// excerptColumns is how much of a long line Render shows.
const excerptColumns = 100

// RenderedMax is how many faults Render writes: what more there is has the same few causes.
const RenderedMax = 100

// Render writes each fault, and below it the line it is on with a mark under the
// offending text. Of very many it writes the first, errors before warnings, and how many more
// there are. The error is the writer's.
func Render(w io.Writer, faults []Fault) error {
	var more []Fault
	if len(faults) > RenderedMax {
		faults = slices.Clone(faults)
		slices.SortStableFunc(faults, func(a, b Fault) int { return cmp.Compare(a.Severity, b.Severity) }) // "error" < "warning"
		faults, more = faults[:RenderedMax], faults[RenderedMax:]
	}
	var text strings.Builder
	for _, f := range faults {
		text.WriteString(f.String() + "\n" + f.excerpt())
	}
	if len(more) > 0 {
		warnings := 0
		for _, f := range more {
			if f.Severity == SeverityWarning {
				warnings++
			}
		}
		fmt.Fprintf(&text, "... and more: errors %d, warnings %d; `shunt check --output json` has them all\n", len(more)-warnings, warnings)
	}
	if _, err := io.WriteString(w, text.String()); err != nil {
		return fmt.Errorf("writing faults: %w", err)
	}
	return nil
}

// excerpt is the line and the mark, or nothing when the fault has no line.
func (f Fault) excerpt() string {
	if f.Line == 0 || strings.TrimSpace(f.line) == "" {
		return ""
	}
	line := []rune(printable(f.line))
	start := min(max(f.Column-1, 0), len(line))
	width := 1
	for _, quote := range []string{"", `"`, "'"} {
		if text := quote + f.Text + quote; text != "" && strings.HasPrefix(string(line[start:]), text) {
			width = utf8.RuneCountInString(text)
		}
	}
	ellipsis := ""
	if start > excerptColumns*3/4 {
		cut := start - excerptColumns/2
		line, start, ellipsis = line[cut:], start-cut, "..."
	}
	if len(line) > excerptColumns {
		line = append(line[:excerptColumns:excerptColumns], []rune("...")...)
		width = min(width, max(excerptColumns-start, 1))
	}
	number := fmt.Sprintf("%5d", f.Line)
	return fmt.Sprintf("%s | %s%s\n%s | %s%s\n", number, ellipsis, string(line),
		strings.Repeat(" ", len(number)), strings.Repeat(" ", len(ellipsis)+start), strings.Repeat("^", width))
}

// printable replaces what a terminal would act on. A tab becomes one space, so that
// columns keep counting characters.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t':
			return ' '
		case !unicode.IsPrint(r):
			return '\uFFFD'
		}
		return r
	}, s)
}

// Place is a position in a file.
type Place struct {
	file         *file
	line, column int // from 1; line 0: the file as a whole
}

// String is "shunt.yaml:12:9".
func (p Place) String() string {
	if p.line == 0 {
		return p.file.name
	}
	return fmt.Sprintf("%s:%d:%d", p.file.name, p.line, p.column)
}

// Whole is the file that a place is in.
func (p Place) Whole() Place { return Place{file: p.file} }

// Mark is where a value was written, and how it went.
type Mark struct {
	At   Place
	path string
	Text string // as written
	Set  bool   // the file has it
	Bad  bool   // it has a fault already: no check builds on it
}

// FaultsMax is how many faults a file may have for its lists to be read on: a file that is
// something else, or has one mistake in each of a hundred thousand entries, is not worth the time.
const FaultsMax = 1000

// Faults gathers what is wrong. Files are ranked in the order they were read.
type Faults struct {
	faults []Fault
	rank   map[string]int
}

// Add files a fault at a mark.
func (c *Faults) Add(s Severity, m Mark, message, suggestion string) {
	f := Fault{
		File: m.At.file.name, Severity: s, Path: m.path, Text: m.Text,
		Message: message, Suggestion: suggestion,
	}
	if m.At.line > 0 {
		f.Line, f.Column, f.line = m.At.file.locate(m.At.line, m.At.column)
	}
	c.faults = append(c.faults, f)
}

// Errorf files an error: what is wrong at a mark, and what to do, which may be empty.
func (c *Faults) Errorf(m Mark, suggestion, format string, args ...any) {
	c.Add(SeverityError, m, fmt.Sprintf(format, args...), suggestion)
}

// Warnf files a warning.
func (c *Faults) Warnf(m Mark, suggestion, format string, args ...any) {
	c.Add(SeverityWarning, m, fmt.Sprintf(format, args...), suggestion)
}

// Sorted is every fault once, in the order of files, lines and columns. A fault inside
// an anchor is met once per alias; it is one fault.
func (c *Faults) Sorted() []Fault {
	slices.SortStableFunc(c.faults, func(a, b Fault) int {
		if d := c.rank[a.File] - c.rank[b.File]; d != 0 {
			return d
		}
		if a.Line != b.Line {
			return a.Line - b.Line
		}
		return a.Column - b.Column
	})
	type key struct {
		file         string
		line, column int
		Message      string
	}
	seen := map[key]bool{}
	return slices.DeleteFunc(c.faults, func(f Fault) bool {
		k := key{f.File, f.Line, f.Column, f.Message}
		if f.Line == 0 || !seen[k] {
			seen[k] = true
			return false
		}
		return true
	})
}
