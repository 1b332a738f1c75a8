package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
	"go.yaml.in/yaml/v4/plugin/loaderlimits"
)

const (
	// fileBytesMax keeps a wrong path (a disk image, a log) from filling the memory. A
	// backend takes about 50 bytes, so this is more than limits.backends allows.
	fileBytesMax = 128 << 20
	// nestingMax is far more than the depth of the format.
	nestingMax = 100
)

// file is one file's text.
type file struct {
	name  string
	lines []string // without their ends
}

func newFile(name string, data []byte) *file {
	text := strings.ReplaceAll(string(data), "\r\n", "\n")
	return &file{name: name, lines: strings.Split(strings.ReplaceAll(text, "\r", "\n"), "\n")}
}

// at returns a position in the file. Lines and columns are smaller than the file, so they fit.
func (f *file) at(line, column int) Position {
	return Position{f, int32(line), int32(column)}
}

// locate limits a position to the file, and adds the line.
func (f *file) locate(line, column int) (int, int, string) {
	line = min(max(line, 1), len(f.lines))
	text := f.lines[line-1]
	last := 0 // column; a line can have megabytes, so only as much is counted as matters
	for range text {
		if last++; last >= column {
			break
		}
	}
	if last < column {
		last++ // behind the end
	}
	return line, min(max(column, 1), last), text
}

// filesOf returns the files to read, and files whose names look like a mistake.
func filesOf(path string) (names, ignored []string, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the configuration: %w; name a file or a directory with --config", err)
	}
	if !info.IsDir() {
		return []string{path}, nil, nil
	}
	entries, err := os.ReadDir(path) // in the order of names
	if err != nil {
		return nil, nil, fmt.Errorf("listing the configuration's directory: %w", err)
	}
	for _, e := range entries {
		name := filepath.Join(path, e.Name())
		if strings.HasPrefix(e.Name(), ".") {
			continue // editors' and tools' own
		}
		switch filepath.Ext(e.Name()) {
		case ".yaml":
			if info, err := os.Stat(name); err == nil && info.IsDir() {
				continue
			}
			names = append(names, name)
		case ".yml":
			ignored = append(ignored, name)
		}
	}
	return names, ignored, nil
}

func readFile(name string) ([]byte, error) {
	info, err := os.Stat(name)
	if err == nil && info.Size() > fileBytesMax {
		err = fmt.Errorf("%s has %d bytes, a configuration has at most %d", name, info.Size(), fileBytesMax)
	}
	var data []byte
	if err == nil {
		data, err = os.ReadFile(name)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	return data, nil
}

// Read reads a file, or a directory's *.yaml in the order of their names. The error says that a file could not
// be read; all other problems are among the faults.
func (f *Format) Read(path string) (*Contents, error) {
	names, ignored, err := filesOf(path)
	if err != nil {
		return nil, err
	}
	c := &Contents{
		format: f, values: map[*Part]reflect.Value{}, named: map[*Part]bool{}, Settings: map[string]any{},
		Faults: Faults{rank: map[string]int{path: -1}},
	}
	for i := range f.parts {
		c.values[&f.parts[i]] = reflect.New(f.parts[i].contents).Elem()
	}
	for i, name := range append(names, ignored...) {
		c.Faults.rank[name] = i
	}
	for _, top := range c.tops() {
		top.At = Position{file: &file{name: path}}
	}
	for _, name := range ignored {
		c.Faults.Warnf(Mark{At: Position{file: &file{name: name}}}, "name it *.yaml", "this file is not read")
	}
	for _, name := range names {
		data, err := readFile(name)
		if err != nil {
			return nil, err
		}
		c.decode(name, data)
	}
	if len(names) == 0 {
		c.Faults.Errorf(Mark{At: Position{file: &file{name: path}}}, "put the configuration there, as shunt.yaml for example", "no file in this directory is named *.yaml")
		return c, nil
	}
	if !c.Said {
		var needed []string
		for _, key := range f.fields() {
			if key.Required {
				needed = append(needed, key.Name)
			}
		}
		if len(needed) == 0 {
			needed = []string{f.fields()[0].Name}
		}
		c.Faults.Errorf(Mark{At: Position{file: &file{name: names[0]}}}, "it needs at least "+Join(needed, "and"), "the configuration is empty")
		return c, nil
	}
	c.build(path)
	return c, nil
}

// decode decodes one file.
func (c *Contents) decode(name string, data []byte) {
	data = bytes.TrimPrefix(data, []byte("\uFEFF"))
	src := newFile(name, data)
	for _, top := range c.tops() {
		if top.At.line == 0 {
			top.At.file = src
		}
	}
	unparsed := func(m Mark, suggestion, format string, args ...any) {
		c.Faults.Errorf(m, suggestion, format, args...)
		c.Unparsed, c.Said = true, true
	}
	if at, bad := invalidText(src); bad {
		unparsed(Mark{At: at}, "save the file as UTF-8 text", "this is not UTF-8 text")
		return
	}
	root, at, err := parse(src, data)
	var unknown *unknownAnchor
	switch {
	case errors.As(err, &unknown):
		unparsed(Mark{At: at, Text: "*" + unknown.name}, unknown.suggestion(src, at), "%v", err)
	case err != nil:
		unparsed(Mark{At: at}, suggestSyntax(src, at), "not valid YAML: %v", err)
	case !isNull(root):
		d := &decoder{contents: c, file: src, valuesMax: expansionMax + len(data), faults: &c.Faults, merging: map[*yaml.Node]bool{}, shared: anchored(root)}
		d.document(root)
		c.Said = true
	}
}

// invalidText finds bytes that are not UTF-8, and NUL, which YAML does not allow.
func invalidText(src *file) (Position, bool) {
	for i, line := range src.lines {
		column := 1
		for offset := 0; offset < len(line); column++ {
			r, size := utf8.DecodeRuneInString(line[offset:])
			if r == 0 || r == utf8.RuneError && size == 1 {
				return src.at(i+1, column), true
			}
			offset += size
		}
	}
	return Position{}, false
}

// parse returns the tree of a file's only document; nil if the file is empty. The parser may panic on text that
// is no YAML: that is an error like any other.
func parse(src *file, data []byte) (root *yaml.Node, at Position, err error) {
	at = src.at(1, 1)
	defer func() {
		if cause := recover(); cause != nil {
			root, err = nil, fmt.Errorf("the YAML parser gave up: %v", cause)
		}
	}()
	loader, err := yaml.NewLoader(bytes.NewReader(data), yaml.WithPlugin(loaderlimits.New(loaderlimits.DepthValue(nestingMax), loaderlimits.AliasNone())))
	if err != nil {
		return nil, at, err
	}
	for {
		document := &yaml.Node{}
		err := loader.Load(document)
		if errors.Is(err, io.EOF) {
			return root, at, nil
		}
		if err != nil {
			var syntax *yaml.LoadError
			if errors.As(err, &syntax) {
				at = src.at(syntax.Mark.Line, syntax.Mark.Column)
				err = syntaxError(syntax)
			}
			return nil, at, err
		}
		if len(document.Content) == 0 || isNull(document.Content[0]) {
			continue
		}
		if root != nil {
			at = src.at(document.Line, document.Column)
			return nil, at, errors.New("a second document begins here; put it into a file of its own")
		}
		root = document.Content[0]
	}
}

// suggestSyntax guesses the reason for a syntax error: the most frequent one.
func suggestSyntax(src *file, at Position) string {
	line := src.lines[min(max(int(at.line), 1), len(src.lines))-1]
	if strings.Contains(line[:len(line)-len(strings.TrimLeft(line, " \t"))], "\t") {
		return "indent with spaces, not with tabs"
	}
	last := len(src.lines)
	for last > 0 && strings.TrimSpace(src.lines[last-1]) == "" {
		last--
	}
	if int(at.line) > last {
		return "close what is open at the end of the file: a bracket, a brace or a quotation mark"
	}
	return ""
}

// syntaxError returns the parser's error without the position.
func syntaxError(e *yaml.LoadError) error {
	if name, is := strings.CutPrefix(e.Message, "unknown anchor '"); is {
		name, _, _ = strings.Cut(name, "'")
		return &unknownAnchor{name}
	}
	if e.ContextMsg == "" || e.ContextMark.Line == e.Mark.Line {
		return errors.New(e.Message)
	}
	return fmt.Errorf("%s, %s that begins at line %d", e.Message, e.ContextMsg, e.ContextMark.Line)
}

// unknownAnchor says that an alias has no anchor.
type unknownAnchor struct{ name string }

func (e *unknownAnchor) Error() string {
	return fmt.Sprintf("alias *%s has no anchor &%[1]s before it", e.name)
}

var anchors = regexp.MustCompile(`(?:^|[\s,\[{:-])&([^\s,\[\]{}]+)`)

// suggestion returns an earlier anchor with a similar name.
func (e *unknownAnchor) suggestion(src *file, at Position) string {
	var names []string
	for i, line := range src.lines[:min(int(at.line), len(src.lines))] {
		if i == int(at.line)-1 {
			line = string([]rune(line)[:min(int(at.column)-1, utf8.RuneCountInString(line))])
		}
		for _, found := range anchors.FindAllStringSubmatch(line, -1) {
			names = append(names, found[1])
		}
	}
	slices.Sort(names)
	if near := Nearest(e.name, slices.Compact(names)); near != "" {
		return fmt.Sprintf("did you mean *%s?", near)
	}
	return ""
}

// applyDefaults gives every Leaf without a good value its default, so that one fault does not cause others. An
// absent value gets the position of the mapping that could contain it, so that a fault about it has one.
func applyDefaults(v reflect.Value) {
	around := markIn(v)
	fields := FieldsOf(v.Type())
	for i := range fields {
		f := &fields[i]
		if !f.Supported() {
			continue
		}
		target := v.FieldByIndex(f.index)
		m := markIn(target)
		if !m.Set {
			m.At, m.path = around.At, around.path
		}
		if l, isLeaf := target.Addr().Interface().(Leaf); isLeaf {
			if f.Default != "" && (!m.Set || m.Bad) {
				mustDefault(l, f)
			}
			continue
		}
		items := target.FieldByName("Items")
		switch {
		case !items.IsValid():
			applyDefaults(target)
		case items.Len() == 0 && f.Default != "":
			element := reflect.New(items.Type().Elem())
			*markIn(element.Elem()) = Mark{At: m.At, path: m.path}
			mustDefault(element.Interface().(Leaf), f)
			items.Set(reflect.Append(items, element.Elem()))
		default:
			if _, _, ok := ElementOf(f.Type); ok {
				for i := range items.Len() {
					applyDefaults(items.Index(i))
				}
			}
		}
	}
}

// markIn returns the mark of a struct of this language.
func markIn(v reflect.Value) *Mark {
	return v.Addr().Interface().(interface{ Where() *Mark }).Where()
}

func mustDefault(l Leaf, f *Field) {
	if c := l.Read(Scalar{KindDefault, f.Default}, f); c != nil {
		panic(fmt.Sprintf("default of %s: %s", f.Name, c.Message)) // of the tags, so every test would fail
	}
}
