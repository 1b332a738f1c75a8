package file

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"
)

// expansionMax is how many values a file's aliases may add to those it spells out, each
// of which takes a byte at least. Aliases of aliases could fill the memory.
const expansionMax = 4_000_000

// decoder fills a document from the syntax tree of one source. What is there already
// came from the sources before it.
type decoder struct {
	source    *source
	faults    *collector
	gaveUp    bool                // faultsMax was reached
	values    int                 // decoded so far
	valuesMax int                 // what the text can spell out, and expansionMax
	merging   map[*yaml.Node]bool // mappings that are being merged, against cycles
	shared    bool                // parts of the tree may be wanted again, by an alias
}

// document decodes the root of a source.
func (d *decoder) document(root *yaml.Node, doc *document) {
	m := d.markOf(root, "")
	m.text = ""
	d.mapping(root, m, reflect.ValueOf(doc).Elem())
}

// resolve follows aliases.
func resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias // an anchor is of no alias, so this ends
	}
	return n
}

// anchored reports whether an alias may stand for a part of the tree.
func anchored(n *yaml.Node) bool {
	return n.Anchor != "" || slices.ContainsFunc(n.Content, anchored)
}

// pair is one key of a mapping with its value.
type pair struct {
	key   mark
	name  string
	value *yaml.Node
}

// pairs lists a mapping's keys, those of merged mappings (<<) last. An explicit key
// wins over a merged one, and an earlier merge over a later one.
func (d *decoder) pairs(n *yaml.Node, m mark) (all []pair, ok bool) {
	n = resolve(n)
	if n.Kind != yaml.MappingNode {
		d.faults.errorf(m, "", "found %s, want a mapping of keys to values", scalarOf(n).found())
		return nil, false
	}
	if d.merging[n] {
		d.faults.errorf(m, "", "this mapping merges itself")
		return nil, false
	}
	d.merging[n] = true
	defer delete(d.merging, n)

	all = make([]pair, 0, len(n.Content)/2)
	seen := seenKeys{}
	var merged []pair
	for i := 0; i+1 < len(n.Content); i += 2 {
		written, value := n.Content[i], n.Content[i+1]
		key := d.markOf(written, m.path)
		if !d.spend(key) {
			return all, false
		}
		if written.Tag == "!!merge" {
			merged = append(merged, d.merge(value, key)...)
			continue
		}
		s := scalarOf(resolve(written))
		if s.kind != kindText && s.kind != kindNumber && s.kind != kindBool {
			d.faults.errorf(key, "", "found %s, want a key", s.found())
			continue
		}
		key.text, key.path = s.text, joinPath(m.path, s.text)
		if first := seen.find(all, s.text); first != nil {
			d.faults.errorf(key, "remove one of them", "key %q is here twice, first at %s", s.text, first.key.at)
			continue
		}
		all = append(all, pair{key, s.text, value})
	}
	for _, p := range merged {
		if seen.find(all, p.name) == nil {
			all = append(all, p)
		}
	}
	return all, true
}

// seenKeys finds pairs by their names. Few are looked through: most mappings have a handful.
type seenKeys map[string]int

// find is the pair of that name. all only grows from call to call.
func (k *seenKeys) find(all []pair, name string) *pair {
	const few = 16
	if len(all) <= few {
		if i := slices.IndexFunc(all, func(p pair) bool { return p.name == name }); i >= 0 {
			return &all[i]
		}
		return nil
	}
	if *k == nil {
		*k = seenKeys{}
	}
	for i := len(*k); i < len(all); i++ {
		(*k)[all[i].name] = i
	}
	if i, ok := (*k)[name]; ok {
		return &all[i]
	}
	return nil
}

// spend counts a key, and says so once when the aliases make them too many.
func (d *decoder) spend(key mark) bool {
	if d.values++; d.values == d.valuesMax+1 {
		d.faults.errorf(key, "", "the aliases of this file expand to more than %d values", expansionMax)
	}
	return d.values <= d.valuesMax
}

// merge is the pairs of a merge key's value: a mapping, or a list of them.
func (d *decoder) merge(n *yaml.Node, m mark) []pair {
	resolved := resolve(n)
	if resolved.Kind != yaml.SequenceNode {
		found, _ := d.pairs(resolved, m)
		return found
	}
	var all []pair
	for _, item := range resolved.Content {
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
func (d *decoder) mapping(n *yaml.Node, m mark, target reflect.Value) {
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
	present := make([]bool, len(fields))
	for _, p := range pairs {
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == p.name })
		switch {
		case i >= 0:
			present[i] = true
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
	for i := range fields {
		if f := &fields[i]; f.required && !present[i] {
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
	case interface{ whole() *mark }:
		d.many(p.value, m, target, v.whole(), f)
	default:
		if target.FieldByName("Items").IsValid() {
			d.list(p.value, m, target)
		} else {
			d.mapping(p.value, m, target)
		}
	}
}

// leaf decodes one scalar. A leaf that another source has set keeps its value.
func (d *decoder) leaf(n *yaml.Node, m mark, v leaf, f *field) {
	where := v.where()
	if where.set {
		d.faults.errorf(m, "keep one of them", "%s is set already at %s", f.name, where.at)
		return
	}
	*where = m
	where.set = true
	if c := v.read(scalarOf(resolve(n)), f); c != nil {
		where.bad = true
		d.faults.errorf(m, c.suggestion, "%s", c.message)
	}
}

// many decodes one scalar or a list of them, behind what other sources gave.
func (d *decoder) many(n *yaml.Node, m mark, target reflect.Value, where *mark, f *field) {
	if !where.set {
		*where = m
		where.set = true
	}
	nodes, paths := []*yaml.Node{n}, []mark{m}
	if resolved := resolve(n); resolved.Kind == yaml.SequenceNode {
		nodes, paths = resolved.Content, nil
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
func (d *decoder) list(n *yaml.Node, m mark, target reflect.Value) {
	where := markIn(target)
	if !where.set {
		*where = m
		where.set = true
	}
	resolved := resolve(n)
	if resolved.Kind != yaml.SequenceNode {
		where.bad = true
		s := scalarOf(resolved)
		suggestion := ""
		if s.kind == kindMapping {
			suggestion = "begin each entry with a dash"
		}
		d.faults.errorf(m, suggestion, "found %s, want a list", s.found())
		return
	}
	items := target.FieldByName("Items")
	items.Grow(min(len(resolved.Content), 1<<16)) // entries are large, and copying them costs more than reading
	for i, item := range resolved.Content {
		if len(d.faults.faults) >= faultsMax {
			if !d.gaveUp {
				d.gaveUp = true
				d.faults.errorf(mark{at: place{source: d.source}}, "mend these first", "after %d faults the rest of this file's lists is not read, from %s on", faultsMax, d.item(item, m, i).path)
			}
			where.bad = true
			return
		}
		items.Grow(1)
		items.SetLen(items.Len() + 1)
		element := items.Index(items.Len() - 1)
		element.SetZero()
		d.mapping(item, d.item(item, m, i), element)
		if markIn(element).bad {
			where.bad = true
			items.SetLen(items.Len() - 1)
		}
		if !d.shared {
			resolved.Content[i] = nil // the tree takes as much memory as everything else
		}
	}
}

// item is the mark of a list's i-th entry.
func (d *decoder) item(n *yaml.Node, list mark, i int) mark {
	return d.markOf(n, fmt.Sprintf("%s[%d]", list.path, i))
}

func isNull(n *yaml.Node) bool {
	return n == nil || n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null"
}

// scalarOf says what a resolved node is.
func scalarOf(n *yaml.Node) scalar {
	switch n.Kind {
	case yaml.SequenceNode:
		return scalar{kind: kindList}
	case yaml.MappingNode:
		return scalar{kind: kindMapping}
	}
	switch n.ShortTag() {
	case "!!null":
		return scalar{kind: kindNothing}
	case "!!int", "!!float":
		return scalar{kindNumber, n.Value}
	case "!!bool":
		return scalar{kindBool, n.Value}
	case "!!str", "!!timestamp", "!!merge":
		return scalar{kindText, n.Value}
	}
	return scalar{kind: kindOther}
}

// markOf is where a node begins.
func (d *decoder) markOf(n *yaml.Node, path string) mark {
	m := mark{at: place{source: d.source, line: max(n.Line, 1), column: max(n.Column, 1)}, path: path}
	switch {
	case n.Kind == yaml.AliasNode:
		m.text = "*" + n.Value
	case n.Kind == yaml.ScalarNode && n.Style&(yaml.LiteralStyle|yaml.FoldedStyle) == 0 && !isNull(n):
		m.text = n.Value
	}
	return m
}
