package control

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// jsonCodec converts messages to and from JSON. Reading is protobuf's own mapping, but refuses unknown fields:
// a misspelt field must not be ignored. Writing differs from that mapping so that it equals `-o json`: names as
// in the schema, 64-bit counters as numbers, and every field that cannot be absent is present.
type jsonCodec struct{ name string }

// Name is the part of the content type after application/.
func (c jsonCodec) Name() string { return c.name }

// Marshal writes a message on one line.
func (jsonCodec) Marshal(message any) ([]byte, error) {
	m, ok := message.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("write JSON of %T, which is no message", message)
	}
	return JSON(m)
}

// Unmarshal reads a message. An empty text is an empty message, as `curl -X POST` sends it.
func (jsonCodec) Unmarshal(text []byte, message any) error {
	m, ok := message.(proto.Message)
	if !ok {
		return fmt.Errorf("read JSON into %T, which is no message", message)
	}
	if len(bytes.TrimSpace(text)) == 0 {
		text = []byte("{}")
	}
	if err := protojson.Unmarshal(text, m); err != nil {
		return fmt.Errorf("the request's JSON: %s", blame(text, m, err))
	}
	return nil
}

// blame describes the fault, beginning with its field: protobuf's errors name the field only sometimes.
func blame(text []byte, m proto.Message, err error) string {
	plain := func(err error) string { // without "proto:" and, at random, one of two spaces
		return strings.TrimLeft(strings.TrimPrefix(err.Error(), "proto:"), " \u00a0")
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(text, &fields) != nil {
		return plain(err)
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		alone, _ := json.Marshal(map[string]json.RawMessage{name: fields[name]})
		if protojson.Unmarshal(alone, m.ProtoReflect().New().Interface()) != nil {
			return name + ": " + plain(err)
		}
	}
	return plain(err)
}

// JSON returns a message as the API and `-o json` write it.
func JSON(m proto.Message) ([]byte, error) {
	var out bytes.Buffer
	if err := writeMessage(&out, m.ProtoReflect()); err != nil {
		return nil, fmt.Errorf("write %s as JSON: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	return out.Bytes(), nil
}

func writeMessage(out *bytes.Buffer, m protoreflect.Message) error {
	if m.Descriptor().FullName().Parent() == "google.protobuf" { // times have a form of their own
		text, err := protojson.Marshal(m.Interface())
		out.Write(text)
		return err
	}
	fields := m.Descriptor().Fields()
	out.WriteByte('{')
	first := true
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.HasPresence() && !m.Has(f) {
			continue
		}
		if !first {
			out.WriteByte(',')
		}
		first = false
		fmt.Fprintf(out, "%q:", f.Name())
		if err := writeField(out, f, m.Get(f)); err != nil {
			return err
		}
	}
	out.WriteByte('}')
	return nil
}

func writeField(out *bytes.Buffer, f protoreflect.FieldDescriptor, v protoreflect.Value) error {
	switch {
	case f.IsList():
		out.WriteByte('[')
		for i := range v.List().Len() {
			if i > 0 {
				out.WriteByte(',')
			}
			if err := writeValue(out, v.List().Get(i)); err != nil {
				return err
			}
		}
		out.WriteByte(']')
		return nil
	case f.IsMap():
		var keys []string
		v.Map().Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
			keys = append(keys, k.String())
			return true
		})
		slices.Sort(keys)
		out.WriteByte('{')
		for i, key := range keys {
			if i > 0 {
				out.WriteByte(',')
			}
			if err := writePlain(out, key); err != nil {
				return err
			}
			out.WriteByte(':')
			if err := writeValue(out, v.Map().Get(protoreflect.ValueOfString(key).MapKey())); err != nil {
				return err
			}
		}
		out.WriteByte('}')
		return nil
	}
	return writeValue(out, v)
}

func writeValue(out *bytes.Buffer, v protoreflect.Value) error {
	if m, is := v.Interface().(protoreflect.Message); is {
		return writeMessage(out, m)
	}
	return writePlain(out, v.Interface())
}

func writePlain(out *bytes.Buffer, v any) error {
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	out.Truncate(out.Len() - min(1, out.Len())) // the line end that Encode adds
	return err
}
