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

// Severity is the effect of a fault on its configuration.
type Severity string

// The severities. The values are the words used in output.
const (
	// SeverityError makes the configuration unusable.
	SeverityError Severity = "error"
	// SeverityWarning leaves it usable, with an effect that its author may not want.
	SeverityWarning Severity = "warning"
)

// Fault is one fault of a configuration, and its position.
type Fault struct {
	File       string   `json:"file"`             // as the caller named it, joined with the file's name in a directory
	Line       int      `json:"line,omitempty"`   // from 1; 0 when the fault is the file's as a whole
	Column     int      `json:"column,omitempty"` // in characters, from 1
	Severity   Severity `json:"severity"`
	Path       string   `json:"path,omitempty"` // the keys that lead to the value, such as services[0].port; indices count in this file
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

// excerptColumns is the part of a long line that Render shows.
const excerptColumns = 100

// RenderedMax is the number of faults that Render writes: further faults have the same few causes.
const RenderedMax = 100

// Render writes each fault, and below it its line with a mark under the offending text. Of very many faults it
// writes the first, errors before warnings, and the number of the rest. The error is the writer's.
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
		fmt.Fprintf(&text, "... and more: errors %d, warnings %d; `shunt check --output json` has up to %d of each\n", len(more)-warnings, warnings, FaultsMax)
	}
	if _, err := io.WriteString(w, text.String()); err != nil {
		return fmt.Errorf("writing faults: %w", err)
	}
	return nil
}

// excerpt returns the line and the mark, or "" if the fault has no line.
func (f Fault) excerpt() string {
	if f.Line == 0 || strings.TrimSpace(f.line) == "" {
		return ""
	}
	line, start, cut := window(f.line, f.Column)
	width := 1
	for _, quote := range []string{"", `"`, "'"} {
		if text := quote + f.Text + quote; text != "" && strings.HasPrefix(string(line[start:]), text) {
			width = utf8.RuneCountInString(text)
		}
	}
	ellipsis := ""
	if cut {
		ellipsis = "..."
	}
	if len(line) > excerptColumns {
		line = append(line[:excerptColumns:excerptColumns], []rune("...")...)
		width = min(width, max(excerptColumns-start, 1))
	}
	number := fmt.Sprintf("%5d", f.Line)
	return fmt.Sprintf("%s | %s%s\n%s | %s%s\n", number, ellipsis, string(line),
		strings.Repeat(" ", len(number)), strings.Repeat(" ", len(ellipsis)+start), strings.Repeat("^", width))
}

// window returns the part of a line around a column (from 1) that an excerpt may show and its mark may be
// under, with the column's position in it, and whether the line begins before it. It reads no more of the line
// than that: a line can have megabytes.
func window(line string, column int) (part []rune, start int, cut bool) {
	start = max(column-1, 0)
	skip := 0
	if start > excerptColumns*3/4 {
		skip, cut = start-excerptColumns/2, true
		start -= skip
	}
	at := 0
	for i := range line {
		if at == skip {
			line = line[i:]
			break
		}
		at++
	}
	if at < skip { // of bytes that are no text there are fewer characters
		return nil, 0, cut
	}
	const most = 2 * excerptColumns
	if len(line) > most*utf8.UTFMax {
		line = line[:most*utf8.UTFMax]
	}
	part = []rune(printable(line))
	part = part[:min(len(part), most)]
	return part, min(start, len(part)), cut
}

// printable replaces characters that a terminal would act on. A tab becomes one space, so that columns keep
// counting characters.
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

// Position is a file, and a line and column in it.
type Position struct {
	file *file
	// line and column count from 1; line 0: the file as a whole. They are small because a large file's contents
	// have a million positions.
	line, column int32
}

// String returns "shunt.yaml:12:9".
func (p Position) String() string {
	if p.line == 0 {
		return p.file.name
	}
	return fmt.Sprintf("%s:%d:%d", p.file.name, p.line, p.column)
}

// Whole returns the file of a position.
func (p Position) Whole() Position { return Position{file: p.file} }

// Mark is the position of a value, and its text.
type Mark struct {
	At   Position
	path string
	Text string // as written
	Set  bool   // the file has it
	Bad  bool   // it has a fault already: no check builds on it
}

// FaultsMax is the number of errors, and of warnings, that are kept; after as many faults, reading ends. A file
// that is something else, or has one mistake in each of a hundred thousand entries, is not worth the time.
const FaultsMax = 1000

// Faults collects faults. Files are ranked in the order in which they were read.
type Faults struct {
	faults []Fault
	rank   map[string]int
	kept   map[Severity]int
	more   map[Severity]int // that are not kept
}

// full reports whether there are so many faults that reading on is not worth the time.
func (c *Faults) full() bool { return len(c.faults) >= FaultsMax }

// Add files a fault at a mark.
func (c *Faults) Add(s Severity, m Mark, message, suggestion string) {
	if c.kept == nil {
		c.kept, c.more = map[Severity]int{}, map[Severity]int{}
	}
	if c.kept[s] >= FaultsMax {
		c.more[s]++
		return
	}
	c.kept[s]++
	c.add(s, m, message, suggestion)
}

// add does the same as Add without a limit.
func (c *Faults) add(s Severity, m Mark, message, suggestion string) {
	f := Fault{
		File: m.At.file.name, Severity: s, Path: m.path, Text: m.Text,
		Message: message, Suggestion: suggestion,
	}
	if m.At.line > 0 {
		f.Line, f.Column, f.line = m.At.file.locate(int(m.At.line), int(m.At.column))
	}
	c.faults = append(c.faults, f)
}

// Errorf files an error: the fault at a mark, and the suggestion, which may be empty.
func (c *Faults) Errorf(m Mark, suggestion, format string, args ...any) {
	c.Add(SeverityError, m, fmt.Sprintf(format, args...), suggestion)
}

// Warnf files a warning.
func (c *Faults) Warnf(m Mark, suggestion, format string, args ...any) {
	c.Add(SeverityWarning, m, fmt.Sprintf(format, args...), suggestion)
}

// Sorted returns every kept fault once, in the order of files, lines and columns. A fault inside an anchor is
// found once per alias, and counts once. The last one gives the number of faults that are not kept.
func (c *Faults) Sorted() []Fault {
	last := len(c.faults) - 1
	for _, s := range []Severity{SeverityError, SeverityWarning} {
		if c.more[s] > 0 {
			f := c.faults[last]
			c.faults = append(c.faults, Fault{File: f.File, Severity: s, Message: fmt.Sprintf("%d more faults of this severity are not shown", c.more[s]), Suggestion: "fix these first"})
			c.more[s] = 0
		}
	}
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
