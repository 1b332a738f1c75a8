package config

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/invopop/jsonschema"
)

// Kind is the type of a piece of YAML. Its value is the type's name in messages.
type Kind string

// The kinds that a leaf may be written as, and others.
const (
	KindText    Kind = "text"
	KindNumber  Kind = "a number"
	KindBool    Kind = "true or false"
	kindNothing Kind = "nothing"
	kindList    Kind = "a list"
	kindMapping Kind = "a mapping"
	kindOther   Kind = "something else"
	// KindDefault is of the default tag, whose kind is right by definition.
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

// Complain is a complaint, and what to do; suggestion may be empty.
func Complain(message, suggestion string) *Complaint { return &Complaint{message, suggestion} }

// Wanted is the complaint about a scalar of the wrong kind.
func Wanted(s Scalar, want, suggestion string) *Complaint {
	return &Complaint{fmt.Sprintf("found %s, want %s", s.found(), want), suggestion}
}

// Leaf is a value that is written as one scalar. A package may have leaves of its own; they embed Mark.
type Leaf interface {
	// Read takes the value from a scalar; on a complaint the value is unchanged.
	Read(s Scalar, f *Field) *Complaint
	// Where is the leaf's mark, to be filled in.
	Where() *Mark
	// Schema describes what Read accepts.
	Schema(f *Field) *jsonschema.Schema
	// Describe is the type, for people.
	Describe() string
}

// Where is the mark of what embeds it.
func (m *Mark) Where() *Mark { return m }

// List is a list of mappings.
type List[T any] struct {
	Mark
	Items []T
}

// JSONSchemaAlias makes the schema that of the items.
func (List[T]) JSONSchemaAlias() any { return []T{} }

// Many is one scalar or a list of them.
type Many[T any] struct {
	Mark
	Items []T
}

// whole is the mark of all of it. Lists whose brackets may be left out are known by this method.
func (list *Many[T]) whole() *Mark { return &list.Mark }

// Later is a key that is known but not supported yet. Nothing is read into it, so it takes no room.
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
