package proto

import (
	"encoding/binary"
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the tables of the protocol's page instead of comparing them")

const page = "../../../docs/guide/udp-protocol.md"

// words are the wire's types in the page.
var words = map[reflect.Kind]string{reflect.Uint16: "u16", reflect.Uint32: "u32", reflect.Uint64: "u64", reflect.Uint8: "byte"}

// rows are a struct's fields: their offset, type and name.
func rows(out *strings.Builder, t reflect.Type, offset int) {
	for i := range t.NumField() {
		f := t.Field(i)
		size := binary.Size(reflect.New(f.Type).Interface())
		kind := words[f.Type.Kind()]
		if f.Type.Kind() == reflect.Array {
			element := words[f.Type.Elem().Kind()]
			if element == "" {
				element = f.Type.Elem().Name()
			}
			kind = fmt.Sprintf("%d × %s", f.Type.Len(), element)
		}
		name := f.Name
		if name == "_" {
			name = "reserved: zero"
		}
		fmt.Fprintf(out, "| %d | %s | %s |\n", offset, kind, name)
		offset += size
	}
	fmt.Fprintf(out, "| %d | | end |\n", offset)
}

// tables are all messages, as the page has them.
func tables() string {
	var out strings.Builder
	table := func(title string, t reflect.Type, offset int) {
		fmt.Fprintf(&out, "### %s\n\n| offset | type | field |\n|---|---|---|\n", title)
		rows(&out, t, offset)
		out.WriteString("\n")
	}
	table("Header", reflect.TypeOf(Header{}), 0)
	for kind := TypeHello; kind <= TypeResume; kind++ {
		t := reflect.TypeOf(bodies[kind]()).Elem()
		table(fmt.Sprintf("%s: type %d", t.Name(), kind), t, headerSize)
	}
	table("Address, in Grant", reflect.TypeOf(Address{}), 0)
	table("Queue, in Grant", reflect.TypeOf(Queue{}), 0)
	table("Count, in Renewed", reflect.TypeOf(Count{}), 0)
	table("Claim, in Report", reflect.TypeOf(Claim{}), 0)
	return out.String()
}

// The page's tables are made from the messages: programs in other languages are written from it.
func TestPageHasTheMessages(t *testing.T) {
	const begin, end = "<!-- tables -->\n\n", "<!-- end of tables -->"
	text, err := os.ReadFile(page)
	must(t, err)
	before, rest, found := strings.Cut(string(text), begin)
	have, after, ended := strings.Cut(rest, end)
	switch {
	case !found || !ended:
		t.Fatalf("%s has no place for tables between %q and %q", page, begin, end)
	case *update:
		must(t, os.WriteFile(page, []byte(before+begin+tables()+end+after), 0o644))
	case have != tables():
		t.Errorf("%s is not as the messages are; run `go test ./internal/udp/proto -run Page -update`", page)
	}
}
