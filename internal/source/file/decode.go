package file

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"
)

// expansionMax is how many values a file's aliases may add to those it spells out, each
// of which takes a byte at least. Aliases of aliases could fill the memory.
const expansionMax = 4_000_000

// decoder fills a document from the syntax tree of one source. What is there already
// came from the sources before it.
type decoder struct {
	source    *source
	faults    *collector
	gaveUp    bool                         // faultsMax was reached
	anchors   map[string][]*ast.AnchorNode // by name, in the order of the file
	values    int                          // decoded so far
	valuesMax int                          // what the text can spell out, and expansionMax
	merging   map[ast.Node]bool            // mappings that are being merged, against cycles
}

// Visit gathers the anchors; ast.Walk calls it.
func (d *decoder) Visit(n ast.Node) ast.Visitor {
	if anchor, ok := n.(*ast.AnchorNode); ok && anchor.Name != nil {
		name := anchor.Name.GetToken().Value
		d.anchors[name] = append(d.anchors[name], anchor)
	}
	return d
}

// document decodes the root of a source.
func (d *decoder) document(root ast.Node, doc *document) {
	ast.Walk(d, root)
	m := d.markOf(root, "")
	m.text = ""
	d.mapping(root, m, reflect.ValueOf(doc).Elem())
}

// resolve follows aliases and takes anchors and tags off. It returns nil after a fault.
func (d *decoder) resolve(n ast.Node, m mark) (node ast.Node, isText bool) {
	for range 100 {
		switch t := n.(type) {
		case *ast.AnchorNode:
			n = t.Value
		case *ast.TagNode:
			isText = isText || t.Start.Value == "!!str"
			n = t.Value
		case *ast.AliasNode:
			target := d.target(t)
			if target == nil {
				d.faults.errorf(m, d.suggestAnchor(t), "alias *%s has no anchor &%[1]s before it", t.Value.GetToken().Value)
				return nil, false
			}
			n = target.Value
		default:
			return n, isText
		}
	}
	d.faults.errorf(m, "", "this alias leads back to itself")
	return nil, false
}

// target is the last anchor of the alias's name before the alias.
func (d *decoder) target(alias *ast.AliasNode) *ast.AnchorNode {
	if alias.Value == nil {
		return nil
	}
	at := d.placeOf(alias)
	anchors := d.anchors[alias.Value.GetToken().Value]
	for _, anchor := range slices.Backward(anchors) {
		p := d.placeOf(anchor)
		if p.line < at.line || p.line == at.line && p.column < at.column {
			return anchor
		}
	}
	return nil
}

func (d *decoder) suggestAnchor(alias *ast.AliasNode) string {
	names := make([]string, 0, len(d.anchors))
	for name := range d.anchors {
		names = append(names, name)
	}
	slices.Sort(names)
	if near := nearest(alias.Value.GetToken().Value, names); near != "" {
		return fmt.Sprintf("did you mean *%s?", near)
	}
	return ""
}

// pair is one key of a mapping with its value.
type pair struct {
	key   mark
	name  string
	value ast.Node
}

// pairs lists a mapping's keys, those of merged mappings (<<) last. An explicit key
// wins over a merged one, and an earlier merge over a later one.
func (d *decoder) pairs(n ast.Node, m mark) (all []pair, ok bool) {
	n, _ = d.resolve(n, m)
	var values []*ast.MappingValueNode
	switch t := n.(type) {
	case nil:
		return nil, false
	case *ast.MappingNode:
		values = t.Values
	case *ast.MappingValueNode:
		values = []*ast.MappingValueNode{t}
	default:
		d.faults.errorf(m, "", "found %s, want a mapping of keys to values", d.scalarOf(n, false).found())
		return nil, false
	}
	if d.merging[n] {
		d.faults.errorf(m, "", "this mapping merges itself")
		return nil, false
	}
	d.merging[n] = true
	defer delete(d.merging, n)

	seen := map[string]mark{}
	var merged []pair
	for _, v := range values {
		key := d.markOf(v.Key, m.path)
		if !d.spend(key) {
			return all, false
		}
		if v.Key.IsMergeKey() {
			merged = append(merged, d.merge(v.Value, key)...)
			continue
		}
		inner, _ := d.resolve(v.Key, key)
		if complexKey, isComplex := inner.(*ast.MappingKeyNode); isComplex {
			inner = complexKey.Value
		}
		s := d.scalarOf(inner, false)
		if s.kind != kindText && s.kind != kindNumber && s.kind != kindBool {
			d.faults.errorf(key, "", "found %s, want a key", s.found())
			continue
		}
		key.text, key.path = s.text, joinPath(m.path, s.text)
		if first, double := seen[s.text]; double {
			d.faults.errorf(key, "remove one of them", "key %q is here twice, first at %s", s.text, first.at)
			continue
		}
		seen[s.text] = key
		all = append(all, pair{key, s.text, v.Value})
	}
	for _, p := range merged {
		if _, overridden := seen[p.name]; !overridden {
			seen[p.name] = p.key
			all = append(all, p)
		}
	}
	return all, true
}

// spend counts a key, and says so once when the aliases make them too many.
func (d *decoder) spend(key mark) bool {
	if d.values++; d.values == d.valuesMax+1 {
		d.faults.errorf(key, "", "the aliases of this file expand to more than %d values", expansionMax)
	}
	return d.values <= d.valuesMax
}

// merge is the pairs of a merge key's value: a mapping, or a list of them.
func (d *decoder) merge(n ast.Node, m mark) []pair {
	resolved, _ := d.resolve(n, m)
	sequence, isList := resolved.(*ast.SequenceNode)
	if !isList {
		if resolved == nil {
			return nil
		}
		found, _ := d.pairs(resolved, m)
		return found
	}
	var all []pair
	for _, item := range sequence.Values {
		found, _ := d.pairs(item, m)
		all = append(all, found...)
	}
	return all
}

func joinPath(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// mapping decodes into a struct of format.go.
func (d *decoder) mapping(n ast.Node, m mark, target reflect.Value) {
	where := markIn(target)
	if !where.set {
		*where = m
		where.set = true
	}
	pairs, ok := d.pairs(n, m)
	if !ok {
		where.bad = true
		return
	}
	fields := fieldsOf(target.Type())
	present := map[string]bool{}
	for _, p := range pairs {
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == p.name })
		switch {
		case i >= 0:
			present[p.name] = true
			d.value(p, target.FieldByIndex(fields[i].index), &fields[i])
		case m.path == "" && strings.HasPrefix(p.name, "x-"):
			// For anchors and for notes of the author.
		default:
			d.faults.errorf(p.key, suggestKey(p.name, fields), "unknown key %q", p.name)
		}
	}
	if m.path == "" {
		return // another source may have what this one lacks
	}
	for _, f := range fields {
		if f.required && !present[f.name] {
			d.faults.errorf(m, fmt.Sprintf("add for example %s: %s", f.name, f.example), "key %q is missing", f.name)
		}
	}
}

// value decodes the value of one key.
func (d *decoder) value(p pair, target reflect.Value, f *field) {
	if !f.supported() {
		d.faults.errorf(p.key, f.instead, "%s is not supported yet", f.name)
		return
	}
	m := d.markOf(p.value, p.key.path)
	if isNull(p.value) { // there is nothing at the value's own place
		m = p.key
	}
	switch v := target.Addr().Interface().(type) {
	case leaf:
		d.leaf(p.value, m, v, f)
	case interface{ single() }:
		d.many(p.value, m, target, f)
	default:
		if target.FieldByName("Items").IsValid() {
			d.list(p.value, m, target)
		} else {
			d.mapping(p.value, m, target)
		}
	}
}

// leaf decodes one scalar. A leaf that another source has set keeps its value.
func (d *decoder) leaf(n ast.Node, m mark, v leaf, f *field) {
	where := v.where()
	if where.set {
		d.faults.errorf(m, "keep one of them", "%s is set already at %s", f.name, where.at)
		return
	}
	*where = m
	where.set = true
	resolved, isText := d.resolve(n, m)
	if resolved == nil {
		where.bad = true
		return
	}
	if c := v.read(d.scalarOf(resolved, isText), f); c != nil {
		where.bad = true
		d.faults.errorf(m, c.suggestion, "%s", c.message)
	}
}

// many decodes one scalar or a list of them, behind what other sources gave.
func (d *decoder) many(n ast.Node, m mark, target reflect.Value, f *field) {
	where := markIn(target)
	if !where.set {
		*where = m
		where.set = true
	}
	resolved, _ := d.resolve(n, m)
	if resolved == nil {
		where.bad = true
		return
	}
	nodes, paths := []ast.Node{n}, []mark{m}
	if sequence, isList := resolved.(*ast.SequenceNode); isList {
		nodes, paths = sequence.Values, nil
		for i, item := range nodes {
			paths = append(paths, d.item(item, m, i))
		}
		if len(nodes) == 0 {
			where.bad = true
			d.faults.errorf(m, "write for example "+f.example, "%s is an empty list", f.name)
		}
	}
	items := target.FieldByName("Items")
	for i, item := range nodes {
		element := reflect.New(items.Type().Elem())
		d.leaf(item, paths[i], element.Interface().(leaf), f)
		if element.Interface().(leaf).where().bad {
			where.bad = true
			continue
		}
		items.Set(reflect.Append(items, element.Elem()))
	}
}

// list decodes a list of mappings, behind what other sources gave.
func (d *decoder) list(n ast.Node, m mark, target reflect.Value) {
	where := markIn(target)
	if !where.set {
		*where = m
		where.set = true
	}
	resolved, isText := d.resolve(n, m)
	sequence, isList := resolved.(*ast.SequenceNode)
	if !isList {
		where.bad = true
		if resolved != nil {
			s := d.scalarOf(resolved, isText)
			suggestion := ""
			if s.kind == kindMapping {
				suggestion = "begin each entry with a dash"
			}
			d.faults.errorf(m, suggestion, "found %s, want a list", s.found())
		}
		return
	}
	items := target.FieldByName("Items")
	items.Grow(min(len(sequence.Values), 1<<16)) // entries are large, and copying them costs more than reading
	for i, item := range sequence.Values {
		if len(d.faults.faults) >= faultsMax {
			if !d.gaveUp {
				d.gaveUp = true
				d.faults.errorf(mark{at: place{source: d.source}}, "mend these first", "after %d faults the rest of this file's lists is not read, from %s on", faultsMax, d.item(item, m, i).path)
			}
			where.bad = true
			return
		}
		element := reflect.New(items.Type().Elem())
		d.mapping(item, d.item(item, m, i), element.Elem())
		if markIn(element.Elem()).bad {
			where.bad = true
			continue
		}
		items.Set(reflect.Append(items, element.Elem()))
	}
}

// item is the mark of a list's i-th entry.
func (d *decoder) item(n ast.Node, list mark, i int) mark {
	return d.markOf(n, fmt.Sprintf("%s[%d]", list.path, i))
}

func isNull(n ast.Node) bool {
	if n == nil {
		return true
	}
	_, ok := n.(*ast.NullNode)
	return ok
}

// scalarOf says what a resolved node is.
func (d *decoder) scalarOf(n ast.Node, isText bool) scalar {
	switch t := n.(type) {
	case nil, *ast.NullNode:
		return scalar{kind: kindNothing}
	case *ast.StringNode:
		if t.Token.Type == token.StringType && isDigits(t.Value) && !isText {
			return scalar{kindNumber, t.Value} // the parser leaves what it cannot hold as text
		}
		return scalar{kindText, t.Value}
	case *ast.LiteralNode:
		if t.Value == nil {
			return scalar{kindText, ""}
		}
		return scalar{kindText, t.Value.Value}
	case *ast.IntegerNode, *ast.FloatNode, *ast.InfinityNode, *ast.NanNode:
		if isText {
			return scalar{kindText, t.GetToken().Value}
		}
		return scalar{kindNumber, t.GetToken().Value}
	case *ast.BoolNode:
		if isText {
			return scalar{kindText, t.Token.Value}
		}
		return scalar{kindBool, t.Token.Value}
	case *ast.SequenceNode:
		return scalar{kind: kindList}
	case *ast.MappingNode, *ast.MappingValueNode:
		return scalar{kind: kindMapping}
	}
	return scalar{kind: kindOther}
}

// markOf is where a node begins.
func (d *decoder) markOf(n ast.Node, path string) mark {
	m := mark{at: d.placeOf(n), path: path}
	switch t := n.(type) {
	case *ast.StringNode, *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		m.text = t.GetToken().Value
	case *ast.AliasNode:
		m.text = "*" + t.String()[1:]
	}
	return m
}

// placeOf is where a node begins. A block mapping begins with its first key, though its
// token is the colon.
func (d *decoder) placeOf(n ast.Node) place {
	for {
		switch t := n.(type) {
		case *ast.MappingNode:
			if !t.IsFlowStyle && len(t.Values) > 0 {
				n = t.Values[0].Key
				continue
			}
		case *ast.MappingValueNode:
			n = t.Key
			continue
		case *ast.LiteralNode:
			return d.placeOfToken(t.Start)
		}
		break
	}
	if n == nil {
		return place{source: d.source, line: 1, column: 1}
	}
	return d.placeOfToken(n.GetToken())
}

func (d *decoder) placeOfToken(t *token.Token) place {
	if t == nil || t.Position == nil {
		return place{source: d.source, line: 1, column: 1}
	}
	return place{source: d.source, line: t.Position.Line, column: t.Position.Column}
}
