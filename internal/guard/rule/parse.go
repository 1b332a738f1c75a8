package rule

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Problem is a fault of an expression.
type Problem struct {
	Column     int // from 1, in characters
	Message    string
	Suggestion string
}

func (p *Problem) Error() string {
	s := fmt.Sprintf("column %d: %s", p.Column, p.Message)
	if p.Suggestion != "" {
		s += "; " + p.Suggestion
	}
	return s
}

const (
	expressionMax = 4096 // bytes
	depthMax      = 64   // of brackets and macros
)

// token is a piece of an expression. kind is 'n' for a name, 'i' for a number, 's' for a text, 'e' for the end, and
// 'o' for all others.
type token struct {
	kind  byte
	text  string // of a text: its value
	start int    // byte
}

// Operators of two characters come first, so that they are not read as one of one.
var operators = []string{"||", "&&", "==", "!=", "<=", ">=", "<", ">", "!", "(", ")", "[", "]", ",", ".", "-", "?", ":", "+", "*", "/", "%", "{", "}"}

// scan cuts an expression into tokens.
func scan(source string) (all []token, problem *Problem) {
	for at := 0; at < len(source); {
		r, size := utf8.DecodeRuneInString(source[at:])
		start := at
		switch {
		case unicode.IsSpace(r):
			at += size
			continue
		case r == '"' || r == '\'':
			t, next, problem := scanText(source, at)
			if problem != nil {
				return nil, problem
			}
			all, at = append(all, t), next
			continue
		case isNameStart(r):
			for at < len(source) && (isNameStart(rune(source[at])) || isDigit(source[at])) {
				at++
			}
			all = append(all, token{'n', source[start:at], start})
			continue
		case isDigit(source[at]):
			for at < len(source) && (isDigit(source[at]) || isNameStart(rune(source[at]))) {
				at++
			}
			all = append(all, token{'i', source[start:at], start})
			continue
		}
		i := slices.IndexFunc(operators, func(o string) bool { return strings.HasPrefix(source[at:], o) })
		if i < 0 {
			return nil, problemAt(source, at, fmt.Sprintf("%q has no meaning here", r), "")
		}
		all = append(all, token{'o', operators[i], at})
		at += len(operators[i])
	}
	return append(all, token{kind: 'e', start: len(source)}), nil
}

func isNameStart(r rune) bool {
	return r == '_' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

var escapes = map[byte]byte{'\\': '\\', '"': '"', '\'': '\'', '`': '`', '?': '?', 'a': '\a', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t', 'v': '\v'}

func scanText(source string, at int) (t token, next int, problem *Problem) {
	quote, start := source[at], at
	var b strings.Builder
	for at++; at < len(source); at++ {
		switch c := source[at]; {
		case c == quote:
			return token{'s', b.String(), start}, at + 1, nil
		case c == '\n' || c == '\r':
			return t, 0, problemAt(source, start, "the text has no end on its line", "close it with "+string(quote))
		case c != '\\':
			b.WriteByte(c)
		default:
			at++
			if at == len(source) {
				continue
			}
			meant, known := escapes[source[at]]
			if !known {
				return t, 0, problemAt(source, at-1, fmt.Sprintf(`the escape \%c is not supported`, source[at]), `write \\ for one backslash`)
			}
			b.WriteByte(meant)
		}
	}
	return t, 0, problemAt(source, start, "the text has no end", "close it with "+string(quote))
}

func problemAt(source string, at int, message, suggestion string) *Problem {
	return &Problem{utf8.RuneCountInString(source[:min(at, len(source))]) + 1, message, suggestion}
}

// env is the environment in which an expression is evaluated.
type env struct {
	event *Event
	items []item // of the macros around, the outermost first
}

// item is an element of a list.
type item struct {
	text    string
	process *Process
}

// node is a part of an expression, after parsing.
type node struct {
	kind    kind
	start   int
	literal bool // the value is the same in each environment
	values[*env]
}

func nodeOf(start int, v values[*env]) node { return node{kind: v.kind(), start: start, values: v} }

// judgement returns a node of kind bool.
func judgement(start int, holds func(*env) bool) node {
	return nodeOf(start, values[*env]{boolean: holds})
}

// variable is the name of a surrounding macro.
type variable struct {
	name string
	kind kind // text, or "" for a process
}

// parser reads one expression and checks its types in one go. It panics with a *Problem, which Compile catches.
type parser struct {
	source    string
	tokens    []token
	of        []string // the types of events
	variables []variable
	depth     int
}

func (p *parser) fail(at int, suggestion, format string, args ...any) {
	panic(problemAt(p.source, at, fmt.Sprintf(format, args...), suggestion))
}

func (p *parser) peek() token { return p.tokens[0] }

func (p *parser) next() token {
	t := p.tokens[0]
	if t.kind != 'e' {
		p.tokens = p.tokens[1:]
	}
	return t
}

func (p *parser) takes(operator string) bool {
	if t := p.peek(); t.kind == 'o' && t.text == operator {
		p.next()
		return true
	}
	return false
}

func (p *parser) expect(operator string) {
	if t := p.peek(); !p.takes(operator) {
		p.fail(t.start, "", "%s was expected, and there is %s", operator, t)
	}
}

func (t token) String() string {
	switch t.kind {
	case 'e':
		return "the end"
	case 's':
		return strconv.Quote(t.text)
	}
	return t.text
}

// notSupported are operators of CEL that this language does not have.
var notSupported = []string{"?", "+", "*", "/", "%", "{"}

// expression reads a whole expression, in brackets or not.
func (p *parser) expression() node {
	if p.depth++; p.depth > depthMax {
		p.fail(p.peek().start, "split the rule", "more than %d brackets are nested", depthMax)
	}
	n := p.either()
	if t := p.peek(); t.kind == 'o' && slices.Contains(notSupported, t.text) {
		p.fail(t.start, "", "the operator %s of CEL is not supported", t.text)
	}
	p.depth--
	return n
}

func (p *parser) either() node {
	left := p.both()
	for p.takes("||") {
		right := p.both()
		p.want(left, boolean)
		p.want(right, boolean)
		a, b := left.boolean, right.boolean
		left = judgement(left.start, func(e *env) bool { return a(e) || b(e) })
	}
	return left
}

func (p *parser) both() node {
	left := p.relation()
	for p.takes("&&") {
		right := p.relation()
		p.want(left, boolean)
		p.want(right, boolean)
		a, b := left.boolean, right.boolean
		left = judgement(left.start, func(e *env) bool { return a(e) && b(e) })
	}
	return left
}

func (p *parser) want(n node, k kind) {
	if n.kind != k {
		p.fail(n.start, "", "%s was expected, and this is %s", k, n.kind)
	}
}

func (p *parser) relation() node {
	left := p.unary()
	for {
		t := p.peek()
		switch {
		case t.kind == 'n' && t.text == "in":
			p.next()
			left = p.member(left, p.unary())
		case t.kind == 'o' && slices.Contains([]string{"==", "!=", "<", "<=", ">", ">="}, t.text):
			p.next()
			left = p.compare(left, t, p.unary())
		default:
			return left
		}
	}
}

func (p *parser) member(item, list node) node {
	if list.kind != texts && list.kind != integers {
		p.fail(list.start, "", "a list was expected, and this is %s", list.kind)
	}
	if list.kind == texts {
		p.want(item, text)
		return judgement(item.start, isMember(item.text, list.texts))
	}
	p.want(item, integer)
	return judgement(item.start, isMember(item.integer, list.integers))
}

func isMember[T comparable](item func(*env) T, list func(*env) []T) func(*env) bool {
	return func(e *env) bool { return slices.Contains(list(e), item(e)) }
}

func (p *parser) compare(left node, operator token, right node) node {
	p.want(right, left.kind)
	switch left.kind {
	case text:
		return judgement(left.start, comparing(left.text, right.text, operator.text))
	case integer:
		return judgement(left.start, comparing(left.integer, right.integer, operator.text))
	case boolean:
		a, b := left.boolean, right.boolean
		switch operator.text {
		case "==":
			return judgement(left.start, func(e *env) bool { return a(e) == b(e) })
		case "!=":
			return judgement(left.start, func(e *env) bool { return a(e) != b(e) })
		}
		p.fail(operator.start, "", "bools cannot be compared by < and >")
	}
	p.fail(operator.start, "use in, or exists", "lists are not compared")
	return node{}
}

// comparing returns the comparison of two values by an operator.
func comparing[T cmp.Ordered](a, b func(*env) T, operator string) func(*env) bool {
	switch operator {
	case "==":
		return func(e *env) bool { return a(e) == b(e) }
	case "!=":
		return func(e *env) bool { return a(e) != b(e) }
	case "<":
		return func(e *env) bool { return a(e) < b(e) }
	case "<=":
		return func(e *env) bool { return a(e) <= b(e) }
	case ">":
		return func(e *env) bool { return a(e) > b(e) }
	}
	return func(e *env) bool { return a(e) >= b(e) }
}

func (p *parser) unary() node {
	t := p.peek()
	if p.takes("!") {
		if p.depth++; p.depth > depthMax {
			p.fail(t.start, "", "more than %d operators are nested", depthMax)
		}
		n := p.unary()
		p.depth--
		p.want(n, boolean)
		a := n.boolean
		return judgement(t.start, func(e *env) bool { return !a(e) })
	}
	if p.takes("-") {
		number := p.next()
		if number.kind != 'i' {
			p.fail(number.start, "", "a number was expected after -, and there is %s", number)
		}
		return p.number("-"+number.text, t.start)
	}
	return p.calls(p.primary())
}

func (p *parser) number(digits string, start int) node {
	n, err := strconv.ParseInt(digits, 0, 64)
	if err != nil || strings.ContainsAny(digits, "_oObB") || len(strings.TrimLeft(digits, "-")) > 1 && strings.TrimLeft(digits, "-")[0] == '0' && !strings.Contains(digits, "x") {
		p.fail(start, "write it as 10 or 0xa", "%s is no int", digits)
	}
	one := nodeOf(start, values[*env]{integer: func(*env) int64 { return n }})
	one.literal = true
	return one
}
