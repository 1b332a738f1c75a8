// Package file is the configuration file as a source of desired state. It turns one
// YAML file, or a directory of them, into a model.Config, and reports everything that
// is wrong with it at once, each fault with its place and a suggestion.
//
//	bytes ── goccy/go-yaml ──► tree ── decode ──► document ── build ──► model.Config
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
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"github.com/shunt-lb/shunt/internal/model"
)

const (
	// fileBytesMax keeps a wrong path (a disk image, a log) from filling the memory. A
	// backend takes about 50 bytes, so this is more than limits.backends allows.
	fileBytesMax = 128 << 20
	// nestingMax is far deeper than the format goes; the YAML parser recurses.
	nestingMax = 100
	// indentMax in columns bounds block nesting, each level of which takes one at least.
	indentMax = 1000
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
	if err != nil {
		suggestion := ""
		if line := src.lines[min(max(at.line, 1), len(src.lines))-1]; strings.Contains(line[:len(line)-len(strings.TrimLeft(line, " \t"))], "\t") {
			suggestion = "indent with spaces, not with tabs"
		}
		p.faults.errorf(mark{at: at}, suggestion, "not valid YAML: %v", err)
		p.unparsed = true
		return true
	}
	if isNull(root) {
		return false
	}
	d := &decoder{source: src, valuesMax: expansionMax + len(data), faults: &p.faults, anchors: map[string][]*ast.AnchorNode{}, merging: map[ast.Node]bool{}}
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
func parse(src *source, data []byte) (root ast.Node, at place, err error) {
	at = place{src, 1, 1}
	defer func() {
		if cause := recover(); cause != nil {
			root, err = nil, fmt.Errorf("the YAML parser gave up: %v", cause)
		}
	}()
	tokens := lexer.Tokenize(string(data))
	if t := tooDeep(tokens); t != nil {
		at.line, at.column = t.Position.Line, t.Position.Column
		return nil, at, fmt.Errorf("nested more than %d brackets or %d columns deep", nestingMax, indentMax)
	}
	tree, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		var syntax interface {
			GetToken() *token.Token
			GetMessage() string
		}
		if errors.As(err, &syntax) {
			if t := syntax.GetToken(); t != nil && t.Position != nil {
				at.line, at.column = t.Position.Line, t.Position.Column
			}
			err = errors.New(syntax.GetMessage())
		}
		return nil, at, err
	}
	for _, doc := range tree.Docs {
		if _, isDirective := doc.Body.(*ast.DirectiveNode); isDirective || isNull(doc.Body) {
			continue
		}
		if root != nil {
			if t := doc.Start; t != nil && t.Position != nil {
				at.line, at.column = t.Position.Line, t.Position.Column
			}
			return nil, at, errors.New("a second document begins here; put it into a file of its own")
		}
		root = doc.Body
	}
	return root, at, nil
}

// tooDeep is the first token that is nested deeper than the format can mean.
func tooDeep(tokens token.Tokens) *token.Token {
	brackets, dashes, line := 0, 0, 0
	for _, t := range tokens {
		if t.Position.Line != line {
			line, dashes = t.Position.Line, 0
		}
		switch t.Type {
		case token.SequenceStartType, token.MappingStartType:
			brackets++
		case token.SequenceEndType, token.MappingEndType:
			brackets--
		case token.SequenceEntryType, token.MappingKeyType, token.TagType, token.AnchorType:
			dashes++ // several of these on a line nest too
		}
		if brackets > nestingMax || dashes > nestingMax || t.Position.IndentNum > indentMax {
			return t
		}
	}
	return nil
}

// applyDefaults gives every leaf without a good value its default, so that one fault
// does not raise others. What is not written gets the place of the mapping that it could
// stand in, so that a fault about it has one.
func applyDefaults(v reflect.Value) {
	around := markIn(v)
	for _, f := range fieldsOf(v.Type()) {
		target := v.FieldByIndex(f.index)
		m := markIn(target)
		if !m.set {
			m.at, m.path = around.at, around.path
		}
		if l, isLeaf := target.Addr().Interface().(leaf); isLeaf {
			if f.def != "" && (!m.set || m.bad) {
				mustDefault(l, &f)
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
			mustDefault(element.Interface().(leaf), &f)
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
