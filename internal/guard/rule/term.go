package rule

import (
	"slices"
	"strings"
	"unicode"
)

// Term is one of the conditions that an expression joins by &&.
type Term struct {
	Column int    // from 1, in characters
	Source string // as in the rule
	Field  string // field that it compares with Values, or that is of kind bool; empty: it has another form
	Values []string
	Not    bool // it holds for all other values

	Of, Pattern string // it is OF.matches(PATTERN), and Field is empty
}

// Terms returns the conditions that all have to hold for an expression to hold; the constant true is none. Compile has to accept the expression.
func Terms(source string) []Term {
	tokens, problem := scan(source)
	if problem != nil {
		return nil
	}
	return termsOf(source, tokens[:len(tokens)-1], len(source))
}

// termsOf returns the terms of tokens, which end before a byte of the source.
func termsOf(source string, tokens []token, end int) (all []Term) {
	tokens, end = unwrap(tokens, end)
	if at(tokens, "||") < 0 {
		if i := at(tokens, "&&"); i >= 0 {
			return append(termsOf(source, tokens[:i], tokens[i].start), termsOf(source, tokens[i+1:], end)...)
		}
	}
	if len(tokens) == 1 && tokens[0].kind == 'n' && tokens[0].text == "true" {
		return nil
	}
	t := Term{Column: problemAt(source, tokens[0].start, "", "").Column, Source: strings.TrimRightFunc(source[tokens[0].start:end], unicode.IsSpace)}
	inner := tokens
	for len(inner) > 1 && inner[0].text == "!" && inner[0].kind == 'o' && isOne(inner[1:]) {
		inner, _ = unwrap(inner[1:], end)
		t.Not = !t.Not
	}
	negated := false
	if t.Field, t.Values, negated = comparison(inner); negated {
		t.Not = !t.Not
	}
	if name, rest := fieldAt(inner); len(rest) == 5 && rest[0].text == "." && rest[1].text == "matches" && rest[3].kind == 's' {
		t.Of, t.Pattern = name, rest[3].text
	}
	return []Term{t}
}

// depths returns the change of the number of open brackets by a token.
func depths(t token) int {
	switch {
	case t.kind != 'o':
		return 0
	case t.text == "(" || t.text == "[":
		return 1
	case t.text == ")" || t.text == "]":
		return -1
	}
	return 0
}

// at returns the position of an operator outside of all brackets; -1: there is none.
func at(tokens []token, operator string) int {
	depth := 0
	for i, t := range tokens {
		if depth == 0 && t.kind == 'o' && t.text == operator {
			return i
		}
		depth += depths(t)
	}
	return -1
}

// isWrapped reports whether the last bracket closes the first one.
func isWrapped(tokens []token) bool {
	if len(tokens) < 3 || tokens[0].kind != 'o' || tokens[0].text != "(" {
		return false
	}
	depth := 0
	for i, t := range tokens {
		if depth += depths(t); depth == 0 {
			return i == len(tokens)-1
		}
	}
	return false
}

// unwrap removes brackets around the whole expression.
func unwrap(tokens []token, end int) ([]token, int) {
	for isWrapped(tokens) {
		end = tokens[len(tokens)-1].start
		tokens = tokens[1 : len(tokens)-1]
	}
	return tokens, end
}

// isOne reports whether a ! before the tokens negates all of them.
func isOne(tokens []token) bool {
	rest := tokens
	for len(rest) > 0 && rest[0].kind == 'o' && rest[0].text == "!" {
		rest = rest[1:]
	}
	name, after := fieldAt(rest)
	return isWrapped(rest) || name != "" && len(after) == 0
}

// fieldAt returns the field that tokens begin with.
func fieldAt(tokens []token) (name string, after []token) {
	for i := 0; i < len(tokens) && tokens[i].kind == 'n'; i += 2 {
		name += tokens[i].text
		if isField(name) {
			return name, tokens[i+1:]
		}
		if i+1 == len(tokens) || tokens[i+1].text != "." {
			break
		}
		name += "."
	}
	return "", nil
}

// comparison reads FIELD, FIELD == "TEXT", "TEXT" == FIELD, FIELD in ["TEXT", …], and the same with !=.
func comparison(tokens []token) (field string, values []string, negated bool) {
	if len(tokens) > 2 && tokens[0].kind == 's' && slices.Contains([]string{"==", "!="}, tokens[1].text) {
		name, rest := fieldAt(tokens[2:])
		if name == "" || len(rest) > 0 {
			return "", nil, false
		}
		return name, []string{tokens[0].text}, tokens[1].text == "!="
	}
	field, rest := fieldAt(tokens)
	switch {
	case field == "" || len(rest) == 0:
		return field, nil, false
	case len(rest) == 2 && rest[1].kind == 's' && slices.Contains([]string{"==", "!="}, rest[0].text):
		return field, []string{rest[1].text}, rest[0].text == "!="
	case len(rest) > 2 && rest[0].kind == 'n' && rest[0].text == "in" && rest[1].text == "[" && rest[len(rest)-1].text == "]":
		for _, t := range rest[2 : len(rest)-1] {
			switch {
			case t.kind == 's':
				values = append(values, t.text)
			case t.kind != 'o' || t.text != ",":
				return "", nil, false
			}
		}
		if len(values) > 0 {
			return field, values, false
		}
	}
	return "", nil, false
}
