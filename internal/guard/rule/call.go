package rule

import (
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/shunt-lb/shunt/internal/config"
)

// Expression is a condition on events of some types.
type Expression struct{ condition node }

// Holds is whether the condition is true of an event.
func (x *Expression) Holds(e *Event) bool { return x.condition.value(&env{event: e}).(bool) }

// Compile reads a condition on events of these types. Fields that none of the types has are refused. The error is a
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
	return &Expression{n}, nil
}

// primary is a literal, a field, a variable, or what is in brackets.
func (p *parser) primary() node {
	switch t := p.next(); {
	case t.kind == 's':
		return node{text, t.start, func(*env) any { return t.text }}
	case t.kind == 'i':
		return p.number(t.text, t.start)
	case t.kind == 'o' && t.text == "(":
		n := p.expression()
		p.expect(")")
		return n
	case t.kind == 'o' && t.text == "[":
		return p.list(t.start)
	case t.kind == 'n' && (t.text == "true" || t.text == "false"):
		return node{boolean, t.start, func(*env) any { return t.text == "true" }}
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
	if len(items) > 0 && items[0].kind == integer {
		return node{integers, start, func(e *env) any { return evaluate[int64](items, e) }}
	}
	return node{texts, start, func(e *env) any { return evaluate[string](items, e) }}
}

func evaluate[T any](items []node, e *env) []T {
	values := make([]T, len(items))
	for i, item := range items {
		values[i] = item.value(e).(T)
	}
	return values
}

// name is a field of the event or a variable of a macro, whose parts are joined by dots.
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
		p.fail(t.start, "add "+config.Join(f.Of, "or")+" to on, or use another field", "%s is of events of type %s alone, and the rule is on %s", whole, config.Join(f.Of, "and"), config.Join(p.of, "and"))
	}
	return node{f.kind, t.start, func(e *env) any { return f.get(e.event) }}
}

func isField(name string) bool {
	return slices.ContainsFunc(Fields, func(f Field) bool { return f.Name == name })
}

// suggest is the field that a wrong name may mean, or the fields that begin in the same way.
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
		return node{text, t.start, func(e *env) any { return e.items[i] }}
	}
	p.expect(".")
	part := p.next()
	f, known := processFields[part.text]
	if part.kind != 'n' || !known {
		p.fail(part.start, "it has pid, program, name and comm", "a process of the list has no %s", part)
	}
	return node{f.kind, t.start, func(e *env) any { return f.get(e.items[i].(Process)) }}
}

// calls reads what is called on a value: .startsWith("x"), .exists(a, …).
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
	a := n.value
	switch n.kind {
	case text:
		return node{integer, n.start, func(e *env) any { return int64(utf8.RuneCountInString(a(e).(string))) }}
	case texts:
		return node{integer, n.start, func(e *env) any { return int64(len(a(e).([]string))) }}
	case integers:
		return node{integer, n.start, func(e *env) any { return int64(len(a(e).([]int64))) }}
	case processes:
		return node{integer, n.start, func(e *env) any { return int64(len(a(e).([]Process))) }}
	}
	p.fail(t.start, "", "a %s has no size", n.kind)
	return n
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
	a, b := n.value, argument.value
	if known {
		return node{boolean, n.start, func(e *env) any { return holds(a(e).(string), b(e).(string)) }}
	}
	if at.kind != 's' {
		p.fail(at.start, "", "matches takes a text, and no field")
	}
	pattern, err := regexp.Compile(b(nil).(string))
	if err != nil {
		p.fail(at.start, "the syntax is RE2's", "%v", err)
	}
	return node{boolean, n.start, func(e *env) any { return pattern.MatchString(a(e).(string)) }}
}

// macro is list.exists(name, condition), and the same with all.
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
	list, is, wanted := n.value, condition.value, t.text == "exists"
	any1 := func(e *env, item any) bool {
		e.items = append(e.items, item)
		holds := is(e).(bool)
		e.items = e.items[:len(e.items)-1]
		return holds == wanted
	}
	return node{boolean, n.start, func(e *env) any {
		if n.kind == texts {
			return slices.ContainsFunc(list(e).([]string), func(s string) bool { return any1(e, s) }) == wanted
		}
		return slices.ContainsFunc(list(e).([]Process), func(s Process) bool { return any1(e, s) }) == wanted
	}}
}
