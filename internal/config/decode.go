package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"
)

// expansionMax is the number of values that a file's aliases may add to those it spells out, each of which
// takes at least one byte. Aliases of aliases could fill the memory.
const expansionMax = 4_000_000

// decoder fills the contents from the syntax tree of one file. Present contents come from earlier files.
type decoder struct {
	contents  *Contents
	file      *file
	faults    *Faults
	values    int                 // decoded so far
	valuesMax int                 // bound: the values that the text can spell out, and expansionMax
	merging   map[*yaml.Node]bool // mappings that are being merged, against cycles
	shared    bool                // parts of the tree may be wanted again, by an alias
}

// document decodes the root of a file.
func (d *decoder) document(root *yaml.Node) {
	m := d.markOf(root, "")
	m.Text = ""
	for _, where := range d.contents.tops() {
		if !where.Set {
			*where = m
			where.Set = true
		}
	}
	pairs, ok := d.pairs(root, m)
	if !ok {
		for _, where := range d.contents.tops() {
			where.Bad = true
		}
		return
	}
	fields := d.contents.format.fields()
	for _, p := range pairs {
		if d.givesUp(p.key) {
			return
		}
		i := slices.IndexFunc(fields, func(f Field) bool { return f.Name == p.name })
		switch {
		case i >= 0:
			d.contents.named[fields[i].part] = true
			d.value(p, d.contents.field(&fields[i]), &fields[i])
		case strings.HasPrefix(p.name, "x-"):
			// For anchors and the author's notes.
		default:
			d.unknown(p, fields)
		}
	}
}

// givesUp reports whether there are so many faults that the rest of the file is not read, and adds a fault
// about that once.
func (d *decoder) givesUp(at Mark) bool {
	if !d.faults.full() {
		return false
	}
	if !d.contents.gaveUp {
		d.contents.gaveUp, d.contents.Unparsed = true, true
		d.faults.add(SeverityError, Mark{At: Position{file: d.file}}, fmt.Sprintf("shunt stops reading after %d faults, at %s", FaultsMax, at.path), "fix these first")
	}
	return true
}

// unknown guesses the meaning of an unknown key.
func (d *decoder) unknown(p pair, fields []Field) {
	fault, suggestion := d.contents.format.unknownKey(p.name, fields)
	d.faults.Errorf(p.key, suggestion, "%s", fault)
}

// resolve follows aliases.
func resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias // an anchor cannot belong to an alias, so this ends
	}
	return n
}

// anchored reports whether an alias may stand for a part of the tree.
func anchored(n *yaml.Node) bool {
	return n.Anchor != "" || slices.ContainsFunc(n.Content, anchored)
}

// pair is one key of a mapping with its value.
type pair struct {
	key   Mark
	name  string
	value *yaml.Node
}

// pairs lists a mapping's keys, those of merged mappings (<<) last. An explicit key
// wins over a merged one, and an earlier merge over a later one.
func (d *decoder) pairs(n *yaml.Node, m Mark) (all []pair, ok bool) {
	n = resolve(n)
	if n.Kind != yaml.MappingNode {
		d.faults.Errorf(m, "", "found %s, want a mapping of keys to values", scalarOf(n).found())
		return nil, false
	}
	if d.merging[n] {
		d.faults.Errorf(m, "", "this mapping merges itself")
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
		if s.Kind != KindText && s.Kind != KindNumber && s.Kind != KindBool {
			d.faults.Errorf(key, "", "found %s, want a key", s.found())
			continue
		}
		key.Text, key.path = s.Text, joinPath(m.path, s.Text)
		if first := seen.find(all, s.Text); first != nil {
			d.faults.Errorf(key, "remove one of them", "key %q is in the mapping twice, first at %s", s.Text, first.key.At)
			continue
		}
		all = append(all, pair{key, s.Text, value})
	}
	for _, p := range merged {
		if seen.find(all, p.name) == nil {
			all = append(all, p)
		}
	}
	return all, true
}

// seenKeys finds pairs by their names. A small mapping is searched without it: most mappings have a
// handful.
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

// spend counts a key, and adds a fault once when the aliases make too many.
func (d *decoder) spend(key Mark) bool {
	if d.values++; d.values == d.valuesMax+1 {
		d.faults.Errorf(key, "", "the aliases of this file expand to more than %d values", expansionMax)
	}
	return d.values <= d.valuesMax
}

// merge returns the pairs of a merge key's value: a mapping, or a list of them.
func (d *decoder) merge(n *yaml.Node, m Mark) []pair {
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

// mapping decodes into a struct of this language.
func (d *decoder) mapping(n *yaml.Node, m Mark, target reflect.Value) {
	where := markIn(target)
	if !where.Set {
		*where = m
		where.Set = true
	}
	pairs, ok := d.pairs(n, m)
	if !ok {
		where.Bad = true
		return
	}
	fields := FieldsOf(target.Type())
	present := make([]bool, len(fields))
	for _, p := range pairs {
		if d.givesUp(p.key) {
			where.Bad = true
			return
		}
		i := slices.IndexFunc(fields, func(f Field) bool { return f.Name == p.name })
		if i < 0 {
			d.unknown(p, fields)
			continue
		}
		present[i] = true
		d.value(p, target.FieldByIndex(fields[i].index), &fields[i])
	}
	for i := range fields {
		if f := &fields[i]; f.Required && !present[i] {
			d.faults.Errorf(m, fmt.Sprintf("add for example %s: %s", f.Name, f.Example), "key %q is missing", f.Name)
		}
	}
}

// value decodes the value of one key.
func (d *decoder) value(p pair, target reflect.Value, f *Field) {
	if !f.Supported() {
		d.faults.Errorf(p.key, f.Instead, "%s", f.unsupported())
		return
	}
	m := d.markOf(p.value, p.key.path)
	if isNull(p.value) { // an empty value has no text of its own, so its faults are at the key
		m = p.key
	}
	switch v := target.Addr().Interface().(type) {
	case Leaf:
		d.leaf(p.value, m, v, f)
	case interface{ whole() *Mark }:
		d.many(p.value, m, target, v.whole(), f)
	default:
		if target.FieldByName("Items").IsValid() {
			d.list(p.value, m, target)
		} else {
			d.mapping(p.value, m, target)
		}
	}
}

// leaf decodes one scalar. A leaf that another file has set keeps its value.
func (d *decoder) leaf(n *yaml.Node, m Mark, v Leaf, f *Field) {
	where := v.Where()
	if where.Set {
		d.faults.Errorf(m, "keep one of them", "%s is set already at %s", f.Name, where.At)
		return
	}
	*where = m
	where.Set = true
	if c := v.Read(scalarOf(resolve(n)), f); c != nil {
		where.Bad = true
		d.faults.Errorf(m, c.Suggestion, "%s", c.Message)
	}
}

// many decodes one scalar or a list of them, and appends to the values of other files.
func (d *decoder) many(n *yaml.Node, m Mark, target reflect.Value, where *Mark, f *Field) {
	if !where.Set {
		*where = m
		where.Set = true
	}
	nodes, paths := []*yaml.Node{n}, []Mark{m}
	if resolved := resolve(n); resolved.Kind == yaml.SequenceNode {
		nodes, paths = resolved.Content, nil
		for i, item := range nodes {
			paths = append(paths, d.item(item, m, i))
		}
		if len(nodes) == 0 {
			where.Bad = true
			d.faults.Errorf(m, "write for example "+f.Example, "%s is an empty list", f.Name)
		}
	}
	items := target.FieldByName("Items")
	for i, item := range nodes {
		if d.givesUp(paths[i]) {
			where.Bad = true
			return
		}
		element := reflect.New(items.Type().Elem())
		d.leaf(item, paths[i], element.Interface().(Leaf), f)
		if element.Interface().(Leaf).Where().Bad {
			where.Bad = true
			continue
		}
		items.Set(reflect.Append(items, element.Elem()))
	}
}

// list decodes a list of mappings, and appends to the entries of other files.
func (d *decoder) list(n *yaml.Node, m Mark, target reflect.Value) {
	where := markIn(target)
	if !where.Set {
		*where = m
		where.Set = true
	}
	resolved := resolve(n)
	if resolved.Kind != yaml.SequenceNode {
		where.Bad = true
		s := scalarOf(resolved)
		suggestion := ""
		if s.Kind == kindMapping {
			suggestion = "begin each entry with a dash"
		}
		d.faults.Errorf(m, suggestion, "found %s, want a list", s.found())
		return
	}
	items := target.FieldByName("Items")
	items.Grow(min(len(resolved.Content), 1<<16)) // entries are large, and copying them costs more than reading
	for i, item := range resolved.Content {
		if d.faults.full() && d.givesUp(d.item(item, m, i)) {
			where.Bad = true
			return
		}
		items.Grow(1)
		items.SetLen(items.Len() + 1)
		element := items.Index(items.Len() - 1)
		element.SetZero()
		d.mapping(item, d.item(item, m, i), element)
		if markIn(element).Bad {
			where.Bad = true
			items.SetLen(items.Len() - 1)
		}
		if !d.shared {
			resolved.Content[i] = nil // the tree takes as much memory as everything else
		}
	}
}

// item returns the mark of a list's i-th entry.
func (d *decoder) item(n *yaml.Node, list Mark, i int) Mark {
	return d.markOf(n, fmt.Sprintf("%s[%d]", list.path, i))
}

func isNull(n *yaml.Node) bool {
	return n == nil || n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null"
}

// scalarOf describes a resolved node.
func scalarOf(n *yaml.Node) Scalar {
	switch n.Kind {
	case yaml.SequenceNode:
		return Scalar{Kind: kindList}
	case yaml.MappingNode:
		return Scalar{Kind: kindMapping}
	}
	switch n.ShortTag() {
	case "!!null":
		return Scalar{Kind: kindNothing}
	case "!!int", "!!float":
		return Scalar{KindNumber, n.Value}
	case "!!bool":
		return Scalar{KindBool, n.Value}
	case "!!str", "!!timestamp", "!!merge":
		return Scalar{KindText, n.Value}
	}
	return Scalar{Kind: kindOther}
}

// markOf returns the position of a node.
func (d *decoder) markOf(n *yaml.Node, path string) Mark {
	m := Mark{At: d.file.at(max(n.Line, 1), max(n.Column, 1)), path: path}
	switch {
	case n.Kind == yaml.AliasNode:
		m.Text = "*" + n.Value
	case n.Kind == yaml.ScalarNode && n.Style&(yaml.LiteralStyle|yaml.FoldedStyle) == 0 && !isNull(n):
		m.Text = n.Value
	}
	return m
}
