// Package file is the configuration file as a source of desired state. It turns one
// YAML file, or a directory of them, into a model.Config, and reports everything that
// is wrong with it at once, each fault with its place and a suggestion.
//
//	bytes ──── go-yaml ────► tree ── decode ──► document ── build ──► model.Config
//	                                     │            │         │
//	                                     └─ faults ◄──┴─────────┘
//	                                     types, keys    meaning      host.go: this machine
//
// The format is written down once, as the structs and tags of format.go. The parser, the
// JSON Schema (schema.go), the guide's reference (guide.go) and every suggestion are
// made from them.
//
// Nothing here needs root or a daemon, and nothing is kept between calls.
package file

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

	"github.com/shunt-lb/shunt/internal/model"
)

const (
	// fileBytesMax keeps a wrong path (a disk image, a log) from filling the memory. A
	// backend takes about 50 bytes, so this is more than limits.backends allows.
	fileBytesMax = 128 << 20
	// nestingMax is far deeper than the format goes.
	nestingMax = 100
)

// source is one file's text.
type source struct {
	name  string
	lines []string // without their ends
}

func newSource(name string, data []byte) *source {
	text := strings.ReplaceAll(string(data), "\r\n", "\n")
	return &source{name: name, lines: strings.Split(strings.ReplaceAll(text, "\r", "\n"), "\n")}
}

// locate bounds a position to the source, and adds the line.
func (s *source) locate(line, column int) (int, int, string) {
	line = min(max(line, 1), len(s.lines))
	text := s.lines[line-1]
	return line, min(max(column, 1), utf8.RuneCountInString(text)+1), text
}

// Parsed is what a configuration says and what is wrong with it.
type Parsed struct {
	// Config is usable if and only if no fault is an error.
	Config model.Config
	// Faults are sorted by file, line and column.
	Faults []Fault

	faults     collector
	interfaces []mark   // of Config.Interfaces
	backends   [][]mark // of Config.Services[i].Backends
	list       mark     // of interfaces as a whole
	groups     []mark   // of Config.API.Group and ReadGroup
	unparsed   bool     // of a file nothing is known, so nothing can be missing
}

// Load reads a file, or a directory's *.yaml in the order of their names. In several
// files lists are appended to each other, and a value may be set in one only.
//
// The configuration is usable if and only if no fault is an error. All faults are
// reported, sorted by file, line and column; only the parser's own first one hides what
// comes after it. The error says that something could not be read, and nothing else.
func Load(path string) (model.Config, []Fault, error) {
	p, err := Read(path)
	if err != nil {
		return model.Config{}, nil, err
	}
	return p.Config, p.Faults, nil
}

// Read is Load, and keeps the positions that Parsed.CheckHost needs.
func Read(path string) (*Parsed, error) {
	names, ignored, err := filesOf(path)
	if err != nil {
		return nil, err
	}
	p := &Parsed{faults: collector{rank: map[string]int{path: -1}}}
	for i, name := range append(names, ignored...) {
		p.faults.rank[name] = i
	}
	doc := &document{}
	doc.at = place{source: &source{name: path}}
	for _, name := range ignored {
		p.faults.warnf(mark{at: place{source: &source{name: name}}}, "name it *.yaml", "this file is not read")
	}
	said := false
	for _, name := range names {
		data, err := readFile(name)
		if err != nil {
			return nil, err
		}
		said = p.source(name, data, doc) || said
	}
	switch {
	case len(names) == 0:
		p.faults.errorf(doc.mark, "put the configuration there, as shunt.yaml for example", "no file in this directory is named *.yaml")
	case !said:
		m := mark{at: place{source: &source{name: names[0]}}}
		p.faults.errorf(m, "it needs at least interfaces and services", "the configuration is empty")
	default:
		applyDefaults(reflect.ValueOf(doc).Elem())
		p.build(doc)
	}
	p.Faults = p.faults.sorted()
	return p, nil
}

// filesOf is the files to read, and those whose name looks like a mistake.
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

// source decodes one file into the document, and reports whether the file says anything.
func (p *Parsed) source(name string, data []byte, doc *document) (said bool) {
	data = bytes.TrimPrefix(data, []byte("\uFEFF"))
	src := newSource(name, data)
	if doc.at.line == 0 {
		doc.at.source = src
	}
	if at, bad := invalidText(src); bad {
		p.faults.errorf(mark{at: at}, "save the file as UTF-8 text", "this is not UTF-8 text")
		p.unparsed = true
		return true
	}
	root, at, err := parse(src, data)
	var unknown *unknownAnchor
	if errors.As(err, &unknown) {
		p.faults.errorf(mark{at: at, text: "*" + unknown.name}, unknown.suggestion(src, at), "%v", err)
		p.unparsed = true
		return true
	}
	if err != nil {
		p.faults.errorf(mark{at: at}, suggestSyntax(src, at), "not valid YAML: %v", err)
		p.unparsed = true
		return true
	}
	if isNull(root) {
		return false
	}
	d := &decoder{source: src, valuesMax: expansionMax + len(data), faults: &p.faults, merging: map[*yaml.Node]bool{}, shared: anchored(root)}
	d.document(root, doc)
	return true
}

// invalidText finds bytes that are not UTF-8, and NUL, which YAML does not allow.
func invalidText(src *source) (place, bool) {
	for i, line := range src.lines {
		column := 1
		for offset := 0; offset < len(line); column++ {
			r, size := utf8.DecodeRuneInString(line[offset:])
			if r == 0 || r == utf8.RuneError && size == 1 {
				return place{src, i + 1, column}, true
			}
			offset += size
		}
	}
	return place{}, false
}

// parse is the tree of a file's only document; nil when the file says nothing. The
// parser may panic on text that is no YAML: that is an error like any other.
func parse(src *source, data []byte) (root *yaml.Node, at place, err error) {
	at = place{src, 1, 1}
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
				at.line, at.column = syntax.Mark.Line, syntax.Mark.Column
				err = syntaxError(syntax)
			}
			return nil, at, err
		}
		if len(document.Content) == 0 || isNull(document.Content[0]) {
			continue
		}
		if root != nil {
			at.line, at.column = document.Line, document.Column
			return nil, at, errors.New("a second document begins here; put it into a file of its own")
		}
		root = document.Content[0]
	}
}

// suggestSyntax is what most often is the reason for a syntax error.
func suggestSyntax(src *source, at place) string {
	line := src.lines[min(max(at.line, 1), len(src.lines))-1]
	if strings.Contains(line[:len(line)-len(strings.TrimLeft(line, " \t"))], "\t") {
		return "indent with spaces, not with tabs"
	}
	last := len(src.lines)
	for last > 0 && strings.TrimSpace(src.lines[last-1]) == "" {
		last--
	}
	if at.line > last {
		return "close what is open at the end of the file: a bracket, a brace or a quotation mark"
	}
	return ""
}

// syntaxError is the parser's error without the place.
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

// unknownAnchor says that an alias stands for nothing.
type unknownAnchor struct{ name string }

func (e *unknownAnchor) Error() string {
	return fmt.Sprintf("alias *%s has no anchor &%[1]s before it", e.name)
}

var anchors = regexp.MustCompile(`(?:^|[\s,\[{:-])&([^\s,\[\]{}]+)`)

// suggestion is an anchor before the place that is called nearly so.
func (e *unknownAnchor) suggestion(src *source, at place) string {
	var names []string
	for i, line := range src.lines[:min(at.line, len(src.lines))] {
		if i == at.line-1 {
			line = string([]rune(line)[:min(at.column-1, utf8.RuneCountInString(line))])
		}
		for _, found := range anchors.FindAllStringSubmatch(line, -1) {
			names = append(names, found[1])
		}
	}
	slices.Sort(names)
	if near := nearest(e.name, slices.Compact(names)); near != "" {
		return fmt.Sprintf("did you mean *%s?", near)
	}
	return ""
}

// applyDefaults gives every leaf without a good value its default, so that one fault
// does not raise others. What is not written gets the place of the mapping that it could
// stand in, so that a fault about it has one.
func applyDefaults(v reflect.Value) {
	around := markIn(v)
	fields := fieldsOf(v.Type())
	for i := range fields {
		f := &fields[i]
		if !f.supported() {
			continue
		}
		target := v.FieldByIndex(f.index)
		m := markIn(target)
		if !m.set {
			m.at, m.path = around.at, around.path
		}
		if l, isLeaf := target.Addr().Interface().(leaf); isLeaf {
			if f.def != "" && (!m.set || m.bad) {
				mustDefault(l, f)
			}
			continue
		}
		items := target.FieldByName("Items")
		switch {
		case !items.IsValid():
			applyDefaults(target)
		case items.Len() == 0 && f.def != "":
			element := reflect.New(items.Type().Elem())
			*markIn(element.Elem()) = mark{at: m.at, path: m.path}
			mustDefault(element.Interface().(leaf), f)
			items.Set(reflect.Append(items, element.Elem()))
		default:
			if _, _, ok := elementOf(f.typ); ok {
				for i := range items.Len() {
					applyDefaults(items.Index(i))
				}
			}
		}
	}
}

// markIn is the mark of a struct of format.go.
func markIn(v reflect.Value) *mark {
	return v.Addr().Interface().(interface{ where() *mark }).where()
}

func mustDefault(l leaf, f *field) {
	if c := l.read(scalar{kindDefault, f.def}, f); c != nil {
		panic(fmt.Sprintf("default of %s: %s", f.name, c.message)) // of format.go, so every test would fail
	}
}
