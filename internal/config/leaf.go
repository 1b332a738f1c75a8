package config

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/invopop/jsonschema"
)

// Kind is the type of a piece of YAML. Its value is the type's name in messages.
type Kind string

// The kinds of YAML values.
const (
	KindText    Kind = "text"
	KindNumber  Kind = "a number"
	KindBool    Kind = "true or false"
	kindNothing Kind = "nothing"
	kindList    Kind = "a list"
	kindMapping Kind = "a mapping"
	kindOther   Kind = "something else"
	// KindDefault is the kind of the default tag, which is right by definition.
	KindDefault Kind = "default"
)

// Scalar is one value as written.
type Scalar struct {
	Kind Kind
	Text string
}

// found describes a piece of YAML for a message.
func (s Scalar) found() string {
	switch s.Kind {
	case KindText:
		return fmt.Sprintf("text %q", s.Text)
	case KindNumber:
		return "the number " + s.Text
	case KindBool:
		return s.Text
	}
	return string(s.Kind)
}

// Complaint is the fault of a scalar.
type Complaint struct {
	Message    string
	Suggestion string
}

// Complain makes a complaint with a suggestion, which may be empty.
func Complain(message, suggestion string) *Complaint { return &Complaint{message, suggestion} }

// Wanted returns the complaint about a scalar of the wrong kind.
func Wanted(s Scalar, want, suggestion string) *Complaint {
	return &Complaint{fmt.Sprintf("found %s, want %s", s.found(), want), suggestion}
}

// Leaf is a value that is written as one scalar. A package may have leaves of its own; they embed Mark.
type Leaf interface {
	// Read takes the value from a scalar; on a complaint the value is unchanged.
	Read(s Scalar, f *Field) *Complaint
	// Where returns the leaf's mark, to be set.
	Where() *Mark
	// Schema describes the values that Read accepts.
	Schema(f *Field) *jsonschema.Schema
	// Describe is the type, for people.
	Describe() string
}

// Where returns the mark of the embedding struct.
func (m *Mark) Where() *Mark { return m }

// List is a list of mappings.
type List[T any] struct {
	Mark
	Items []T
}

// JSONSchemaAlias makes the schema equal to that of the items.
func (List[T]) JSONSchemaAlias() any { return []T{} }

// Many is one scalar or a list of them.
type Many[T any] struct {
	Mark
	Items []T
}

// whole returns the mark of the whole value. Lists whose brackets may be omitted are recognised by this method.
func (list *Many[T]) whole() *Mark { return &list.Mark }

// Later is a key that is known but not supported yet. Its value is not read, so it takes no room.
type Later struct{}

func (*Later) Read(Scalar, *Field) *Complaint { return nil }

func (*Later) Where() *Mark { return &Mark{} }

func (*Later) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{Not: jsonschema.TrueSchema}
}

func (*Later) Describe() string { return "" }

func notYet(what, suggestion string) *Complaint {
	return &Complaint{what + " is not supported yet", suggestion}
}

func count(n uint64) *uint64 { return &n }

func jsonNumber(n uint64) json.Number { return json.Number(strconv.FormatUint(n, 10)) }
