package rule

import (
	"path"
	"regexp/syntax"
	"slices"
	"strings"
)

// Names describe the names of files for which rules can hold.
type Names struct {
	Any     bool     // nothing is known: it can have every name
	Files   []string // the last part of its path is one of these, or
	Folders []string // the part before that is one of these, or
	Above   []string // the part before both is one of these
}

// namesMax limits the names that are collected of a rule; with more, the rule counts as one for any name.
const namesMax = 128

func (n *Names) add(m Names) {
	n.Any = n.Any || m.Any
	n.Files, n.Folders, n.Above = append(n.Files, m.Files...), append(n.Folders, m.Folders...), append(n.Above, m.Above...)
}

// OpenNames returns the names of files for whose opens, to read and to write, any of these rules can hold. No rule can
// hold for an open of another name.
func OpenNames(rules []Rule) (reads, writes Names) {
	for _, r := range rules {
		if !slices.Contains(r.On, Open) {
			continue
		}
		terms := Terms(r.If)
		names := Names{Any: true}
		for _, t := range terms {
			if of := t.names(); names.Any && !of.Any {
				names = of
			}
		}
		forReading, forWriting := Opens(terms)
		if forReading {
			reads.add(names)
		}
		if forWriting {
			writes.add(names)
		}
	}
	return reads, writes
}

// Opens reports for which opens the terms of a condition can hold: to read, and to write.
func Opens(terms []Term) (reads, writes bool) {
	reads, writes = true, true
	for _, t := range terms {
		if t.Field == "file.write" && t.Values == nil {
			reads, writes = reads && t.Not, writes && !t.Not
		}
	}
	return reads, writes
}

// names returns the file names for which a part of a condition can hold.
func (t Term) names() (n Names) {
	switch {
	case t.Not:
	case (t.Field == "file.path" || t.Field == "file.name") && t.Values != nil:
		for _, value := range t.Values {
			n.Files = append(n.Files, path.Base(value))
		}
		return n
	case t.Pattern != "" && t.Of == "file.path":
		return patternNames(t.Pattern)
	}
	return Names{Any: true}
}

// Marks in the ends of texts that patterns match.
const (
	endMark  = "\x00" // the text's end
	wildMark = "\x01" // any text without a slash
)

// patternNames returns the last parts of the paths that a pattern matches.
func patternNames(pattern string) (n Names) {
	re, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return Names{Any: true}
	}
	all, ok := ends(re.Simplify())
	if !ok {
		return Names{Any: true}
	}
	for _, e := range all {
		text, isAnchored := strings.CutSuffix(e.text, endMark)
		parts := strings.Split(text, "/")
		last := len(parts) - 1
		// A part is a whole name if a slash is before it.
		isName := func(i int) bool { return i > 0 && parts[i] != "" && !strings.Contains(parts[i], wildMark) }
		switch {
		case !isAnchored || strings.Contains(text, endMark) || last == 0:
			return Names{Any: true}
		case isName(last):
			n.Files = append(n.Files, parts[last])
		case isName(last - 1):
			n.Folders = append(n.Folders, parts[last-1])
		case last > 1 && parts[last] != "" && parts[last-1] != "" && isName(last-2):
			n.Above = append(n.Above, parts[last-2])
		default:
			return Names{Any: true}
		}
	}
	return n
}

// end is the end of texts that a pattern matches.
type end struct {
	text    string
	isWhole bool // it is the whole match
}

// ends returns the ends of the texts that a pattern matches; ok is false if there are too many, or unknown ones.
func ends(re *syntax.Regexp) (all []end, ok bool) {
	anything := []end{{"", false}}
	if re.Flags&syntax.FoldCase != 0 {
		return anything, true
	}
	switch re.Op {
	case syntax.OpEmptyMatch, syntax.OpBeginText:
		return []end{{"", true}}, true
	case syntax.OpEndText:
		return []end{{endMark, true}}, true
	case syntax.OpLiteral:
		return []end{{string(re.Rune), true}}, true
	case syntax.OpCapture:
		return ends(re.Sub[0])
	case syntax.OpCharClass:
		return classEnds(re), true
	case syntax.OpQuest:
		all, ok = ends(re.Sub[0])
		return append(slices.Clone(all), end{"", true}), ok
	case syntax.OpStar, syntax.OpPlus:
		if re.Sub[0].Op == syntax.OpCharClass && !hasSlash(re.Sub[0]) {
			return []end{{wildMark, true}}, true
		}
		return anything, true
	case syntax.OpAlternate:
		for _, sub := range re.Sub {
			some, is := ends(sub)
			if all = append(all, some...); !is || len(all) > namesMax {
				return nil, false
			}
		}
		return all, true
	case syntax.OpConcat:
		return concatEnds(re.Sub)
	}
	return anything, true
}

func concatEnds(subs []*syntax.Regexp) (all []end, ok bool) {
	all = []end{{"", true}}
	for _, sub := range slices.Backward(subs) {
		if !slices.ContainsFunc(all, func(e end) bool { return e.isWhole }) {
			break
		}
		before, is := ends(sub)
		if !is {
			return nil, false
		}
		var next []end
		for _, e := range all {
			if !e.isWhole {
				next = append(next, e)
				continue
			}
			for _, b := range before {
				next = append(next, end{b.text + e.text, b.isWhole})
			}
		}
		if all = next; len(all) > namesMax {
			return nil, false
		}
	}
	return all, true
}

// classEnds returns the characters of a class, if they are few.
func classEnds(re *syntax.Regexp) (all []end) {
	const few = 16
	for i := 0; i < len(re.Rune); i += 2 {
		for r := re.Rune[i]; r <= re.Rune[i+1]; r++ {
			if all = append(all, end{string(r), true}); len(all) > few {
				if hasSlash(re) {
					return []end{{"", false}}
				}
				return []end{{wildMark, true}}
			}
		}
	}
	return all
}

func hasSlash(re *syntax.Regexp) bool {
	for i := 0; i < len(re.Rune); i += 2 {
		if re.Rune[i] <= '/' && '/' <= re.Rune[i+1] {
			return true
		}
	}
	return false
}
