package rule

import (
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/shunt-lb/shunt/internal/config"
)

// Expression is a condition for events of some types.
type Expression struct{ condition func(*env) bool }

// environments are reused: one is needed for each rule and event.
var environments = sync.Pool{New: func() any { return new(env) }}

// Holds reports whether the condition is true for an event. It allocates nothing, unless the condition has a list with fields in it.
func (x *Expression) Holds(e *Event) bool {
	around := environments.Get().(*env)
	around.event = e
	holds := x.condition(around)
	around.event = nil
	environments.Put(around)
	return holds
}

// Compile reads a condition for events of these types. It refuses fields that none of the types has. The error is a
// *Problem.
func Compile(source string, of []string) (x *Expression, err error) {
	if len(source) > expressionMax {
		return nil, &Problem{1, "the expression is longer than 4096 bytes", "split the rule"}
	}
	if !utf8.ValidString(source) {
		return nil, &Problem{1, "the expression is not UTF-8", ""}
	}
	tokens, problem := scan(source)
	if problem != nil {
		return nil, problem
	}
	defer func() {
		switch caught := recover().(type) {
		case nil:
		case *Problem:
			x, err = nil, caught
		default:
			panic(caught)
		}
	}()
	p := &parser{source: source, tokens: tokens, of: of}
	n := p.expression()
	if t := p.peek(); t.kind != 'e' {
		p.fail(t.start, "", "the end was expected, and there is %s", t)
	}
	p.want(n, boolean)
	return &Expression{n.boolean}, nil
}

// primary reads a literal, a field, a variable, or an expression in brackets.
func (p *parser) primary() node {
	switch t := p.next(); {
	case t.kind == 's':
		n := nodeOf(t.start, values[*env]{text: func(*env) string { return t.text }})
		n.literal = true
		return n
	case t.kind == 'i':
		return p.number(t.text, t.start)
	case t.kind == 'o' && t.text == "(":
		n := p.expression()
		p.expect(")")
		return n
	case t.kind == 'o' && t.text == "[":
		return p.list(t.start)
	case t.kind == 'n' && (t.text == "true" || t.text == "false"):
		is := t.text == "true"
		return judgement(t.start, func(*env) bool { return is })
	case t.kind == 'n':
		return p.name(t)
	default:
		p.fail(t.start, "", "a value was expected, and there is %s", t)
		return node{}
	}
}

func (p *parser) list(start int) node {
	var items []node
	for !p.takes("]") {
		if len(items) > 0 {
			p.expect(",")
		}
		item := p.expression()
		if item.kind != text && item.kind != integer {
			p.fail(item.start, "", "a list has strings or ints, and this is a %s", item.kind)
		}
		if len(items) > 0 {
			p.want(item, items[0].kind)
		}
		items = append(items, item)
	}
	isLiteral := !slices.ContainsFunc(items, func(n node) bool { return !n.literal })
	if len(items) > 0 && items[0].kind == integer {
		return nodeOf(start, values[*env]{integers: evaluate(items, isLiteral, func(n node) func(*env) int64 { return n.integer })})
	}
	return nodeOf(start, values[*env]{texts: evaluate(items, isLiteral, func(n node) func(*env) string { return n.text })})
}

// evaluate returns a list's value: a list of literals is made once.
func evaluate[T any](items []node, isLiteral bool, of func(node) func(*env) T) func(*env) []T {
	all := func(e *env) []T {
		values := make([]T, len(items))
		for i, item := range items {
			values[i] = of(item)(e)
		}
		return values
	}
	if isLiteral {
		once := all(nil)
		return func(*env) []T { return once }
	}
	return all
}

// name reads a field of the event or a variable of a macro, whose parts are joined by dots.
func (p *parser) name(t token) node {
	if i := slices.IndexFunc(p.variables, func(v variable) bool { return v.name == t.text }); i >= 0 {
		return p.variable(i, t)
	}
	whole := t.text
	for !isField(whole) && len(p.tokens) > 2 && p.peek().text == "." && p.peek().kind == 'o' && p.tokens[1].kind == 'n' && (p.tokens[2].kind != 'o' || p.tokens[2].text != "(") {
		p.next()
		whole += "." + p.next().text
	}
	i := slices.IndexFunc(Fields, func(f Field) bool { return f.Name == whole })
	if i < 0 {
		p.fail(t.start, suggest(whole), "there is no field %q", whole)
	}
	f := Fields[i]
	if f.Of != nil && !slices.ContainsFunc(f.Of, func(of string) bool { return slices.Contains(p.of, of) }) {
		p.fail(t.start, "add "+config.Join(f.Of, "or")+" to on, or use another field", "%s belongs to events of type %s, and the rule is on %s", whole, config.Join(f.Of, "and"), config.Join(p.of, "and"))
	}
	return nodeOf(t.start, of(f.get, func(e *env) *Event { return e.event }))
}

func isField(name string) bool {
	return slices.ContainsFunc(Fields, func(f Field) bool { return f.Name == name })
}

// suggest returns the field that a wrong name may mean, or the fields with the same beginning.
func suggest(name string) string {
	var names, same []string
	group, _, _ := strings.Cut(name, ".")
	for _, f := range Fields {
		names = append(names, f.Name)
		if strings.HasPrefix(f.Name, group+".") {
			same = append(same, f.Name)
		}
	}
	if near := config.Nearest(name, names); near != "" {
		return "did you mean " + near + "?"
	}
	if len(same) > 0 {
		return "there is " + config.Join(same, "and")
	}
	return "`shunt guard fields` lists them"
}

func (p *parser) variable(i int, t token) node {
	if p.variables[i].kind == text {
		return nodeOf(t.start, values[*env]{text: func(e *env) string { return e.items[i].text }})
	}
	p.expect(".")
	part := p.next()
	f, known := processFields[part.text]
	if part.kind != 'n' || !known {
		p.fail(part.start, "it has pid, program, name and comm", "a process of the list has no %s", part)
	}
	return nodeOf(t.start, of(f, func(e *env) *Process { return e.items[i].process }))
}

// calls reads calls on a value: .startsWith("x"), .exists(a, …).
func (p *parser) calls(n node) node {
	for p.takes(".") {
		t := p.next()
		if t.kind != 'n' {
			p.fail(t.start, "", "a name was expected, and there is %s", t)
		}
		p.expect("(")
		switch {
		case t.text == "size":
			n = p.size(n, t)
		case t.text == "exists" || t.text == "all":
			n = p.macro(n, t)
		default:
			n = p.method(n, t)
		}
		p.expect(")")
	}
	return n
}

func (p *parser) size(n node, t token) node {
	var size func(*env) int64
	switch n.kind {
	case text:
		size = func(e *env) int64 { return int64(utf8.RuneCountInString(n.text(e))) }
	case texts:
		size = sizeOf(n.texts)
	case integers:
		size = sizeOf(n.integers)
	case processes:
		size = sizeOf(n.processes)
	default:
		p.fail(t.start, "", "a %s has no size", n.kind)
	}
	return nodeOf(n.start, values[*env]{integer: size})
}

func sizeOf[T any](list func(*env) []T) func(*env) int64 {
	return func(e *env) int64 { return int64(len(list(e))) }
}

var methods = map[string]func(s, argument string) bool{"startsWith": strings.HasPrefix, "endsWith": strings.HasSuffix, "contains": strings.Contains}

func (p *parser) method(n node, t token) node {
	holds, known := methods[t.text]
	if !known && t.text != "matches" {
		p.fail(t.start, "there is startsWith, endsWith, contains, matches, size, exists and all", "%s is not supported", t)
	}
	p.want(n, text)
	at := p.peek()
	argument := p.expression()
	p.want(argument, text)
	a, b := n.text, argument.text
	if known {
		return judgement(n.start, func(e *env) bool { return holds(a(e), b(e)) })
	}
	if at.kind != 's' {
		p.fail(at.start, "", "matches takes a text, not a field")
	}
	pattern, err := regexp.Compile(b(nil))
	if err != nil {
		p.fail(at.start, "the syntax is RE2's", "%v", err)
	}
	return judgement(n.start, func(e *env) bool { return pattern.MatchString(a(e)) })
}

// macro reads list.exists(name, condition), and the same with all.
func (p *parser) macro(n node, t token) node {
	if n.kind != texts && n.kind != processes {
		p.fail(t.start, "", "%s is of lists of strings or processes, and this is a %s", t, n.kind)
	}
	name := p.next()
	if name.kind != 'n' || isField(name.text) || slices.ContainsFunc(p.variables, func(v variable) bool { return v.name == name.text }) {
		p.fail(name.start, "write exists(x, …)", "a new name was expected, and there is %s", name)
	}
	p.expect(",")
	v := variable{name: name.text}
	if n.kind == texts {
		v.kind = text
	}
	p.variables = append(p.variables, v)
	condition := p.expression()
	p.want(condition, boolean)
	p.variables = p.variables[:len(p.variables)-1]
	is, wanted := condition.boolean, t.text == "exists"
	with := func(e *env, one item) bool {
		e.items = append(e.items, one)
		holds := is(e)
		e.items = e.items[:len(e.items)-1]
		return holds == wanted
	}
	if n.kind == texts {
		return judgement(n.start, func(e *env) bool {
			for _, s := range n.texts(e) {
				if with(e, item{text: s}) {
					return wanted
				}
			}
			return !wanted
		})
	}
	return judgement(n.start, func(e *env) bool {
		all := n.processes(e)
		for i := range all {
			if with(e, item{process: &all[i]}) {
				return wanted
			}
		}
		return !wanted
	})
}
