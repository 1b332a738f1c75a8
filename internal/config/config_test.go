package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/invopop/jsonschema"
)

// rootEntry is the top of a configuration in miniature.
type rootEntry struct {
	Mark  `json:"-"`
	Lanes List[laneEntry] `json:"lanes" doc:"Where packets go." example:"[{name: left}]"`
	Speed Number          `json:"speed,omitempty" doc:"How fast." min:"1" max:"100" default:"50" example:"70" unit:"km/h"`
	Shape shapeEntry      `json:"shape,omitempty" doc:"How it looks." example:"{kind: round}"`
}

type laneEntry struct {
	Mark  `json:"-"`
	Name  Text         `json:"name" doc:"Its name." min:"1" max:"8" example:"left"`
	Ports Many[Number] `json:"ports,omitempty" doc:"Its ports." min:"1" max:"65535" default:"80" example:"[80, 81]"`
	Shape shapeEntry   `json:"shape,omitempty" doc:"How it looks." example:"{kind: round}"`
}

type shapeEntry struct {
	Mark `json:"-"`
	Kind Word `json:"kind,omitempty" doc:"Its kind." enum:"round|flat" default:"flat" example:"round"`
}

// meterEntry is the section of another product, which has a leaf of its own and names that the top
// has as well.
type meterEntry struct {
	Mark     `json:"-"`
	Interval Duration    `json:"interval,omitempty" doc:"How often it counts." min:"1s" max:"1m" default:"10s" example:"5s"`
	Lanes    List[probe] `json:"lanes,omitempty" doc:"What is counted." example:"[{color: red}]"`
	Shape    shapeEntry  `json:"shape,omitempty" doc:"How it looks." example:"{kind: round}"`
}

type probe struct {
	Mark  `json:"-"`
	Color color `json:"color" doc:"The color." example:"red"`
}

// color is a leaf that package config does not know.
type color struct {
	Mark
	Value string
}

func (c *color) Read(s Scalar, _ *Field) *Complaint {
	if s.Text != "red" && s.Text != "blue" {
		return Complain(s.Text+" is no color", "write red")
	}
	c.Value = s.Text
	return nil
}

func (*color) Schema(*Field) *jsonschema.Schema {
	return &jsonschema.Schema{Enum: []any{"red", "blue"}}
}
func (*color) Describe() string { return "color" }

// meter is the product's settings.
type meter struct {
	interval time.Duration
	colors   []string
}

// buildRoot needs lanes.
func buildRoot(r *rootEntry, read *Contents) any {
	if !r.Lanes.Set && !read.Unparsed {
		read.Faults.Errorf(Mark{At: r.At.Whole()}, "", "there is no key \"lanes\"")
	}
	return r
}

// hostEntry is the entry of every product.
type hostEntry struct {
	Mark   `json:"-"`
	Street Text `json:"street,omitempty" doc:"Where it is." min:"1" max:"8" default:"high" example:"low"`
}

func buildHost(h *hostEntry, _ *Contents) any { return h.Street.Value }

// builtMeter is the section that a meter was last made of.
var builtMeter *meterEntry

// buildMeter refuses a color that is there twice.
func buildMeter(m *meterEntry, read *Contents) any {
	builtMeter = m
	built := meter{interval: m.Interval.Value}
	for _, lane := range m.Lanes.Items {
		if lane.Color.Value == "" {
			continue // it has a fault already
		}
		if slices.Contains(built.colors, lane.Color.Value) {
			read.Faults.Errorf(lane.Color.Mark, "remove one of them", "%s is counted twice", lane.Color.Value)
		}
		built.colors = append(built.colors, lane.Color.Value)
	}
	return built
}

func formatWithMeter() *Format {
	return NewFormat(NewTop("root", buildRoot), NewSection("meter", "Counts packets.", "{interval: 5s}", buildMeter), NewTop("host", buildHost).Always())
}

// read reads files as the format, in the order of their names.
func read(t *testing.T, f *Format, files ...string) (*Contents, []string) {
	t.Helper()
	dir := t.TempDir()
	for i, text := range files {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.yaml", i)), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c, err := f.Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	var faults []string
	for _, fault := range c.Faults.Sorted() {
		faults = append(faults, strings.ReplaceAll(fault.String(), dir+"/", ""))
	}
	return c, faults
}

func requireFaults(t *testing.T, have []string, want ...string) {
	t.Helper()
	if !slices.Equal(have, want) {
		t.Errorf("the faults are\n\t%s\nwant\n\t%s", strings.Join(have, "\n\t"), strings.Join(want, "\n\t"))
	}
}

// A section is read from several files as the rest is, gets its defaults, and its product's settings.
func TestSectionOfAProduct(t *testing.T) {
	c, faults := read(t, formatWithMeter(), "lanes: [{name: a}]\nmeter: {lanes: [{color: red}]}\n", "meter: {lanes: [{color: blue}]}\n")
	requireFaults(t, faults)
	if want := (meter{10 * time.Second, []string{"red", "blue"}}); !reflect.DeepEqual(c.Settings["meter"], want) {
		t.Errorf("the section's settings are %v, want %v", c.Settings["meter"], want)
	}
	root := c.Settings["root"].(*rootEntry)
	if root.Lanes.Items[0].Name.Value != "a" || root.Speed.Value != 50 || root.Lanes.Items[0].Ports.Items[0].Value != 80 {
		t.Errorf("the top is %+v", root)
	}

	c, faults = read(t, formatWithMeter(), "lanes: [{name: a}]\n")
	requireFaults(t, faults)
	if c.Settings["meter"] != nil || has(c, "meter") || !has(c, "root") {
		t.Errorf("without the section there are settings: %v", c.Settings)
	}
}

// has reports whether a file has a key of the part of that name.
func has(c *Contents, name string) bool {
	for part := range c.named {
		if part.name == name {
			return true
		}
	}
	return false
}

// A file is about the parts that it names. A file that names none is about the first part, and then
// has to have that part's required keys.
func TestFileOfOnePart(t *testing.T) {
	const missing = `0.yaml: error: there is no key "lanes"`
	for text, want := range map[string]struct{ parts, faults string }{
		"lanes: [{name: a}]\n":               {"host root", ""},
		"speed: 3\n":                         {"host root", missing},
		"meter: {}\n":                        {"host meter", ""},
		"meter: {}\nstreet: low\n":           {"host meter", ""},
		"meter: {}\nspeed: 3\n":              {"host meter root", missing},
		"street: low\n":                      {"host root", missing},
		"x-note: 1\n":                        {"host root", missing},
		"meter: []\n":                        {"host meter", "0.yaml:1:8: error: meter: found a list, want a mapping of keys to values"},
		"meter: {}\nlanes: [{name: a}, 3]\n": {"host meter root", "0.yaml:2:20: error: lanes[1]: found the number 3, want a mapping of keys to values"},
	} {
		c, faults := read(t, formatWithMeter(), text)
		if got := strings.Join(slices.Sorted(maps.Keys(c.Settings)), " "); got != want.parts || strings.Join(faults, "; ") != want.faults {
			t.Errorf("%q is about %s, with the faults %q; want %s and %q", text, got, faults, want.parts, want.faults)
		}
	}
}

// The schema requires a part's required keys only if the file has another key of the part.
func TestSchemaRequiresWithinAPart(t *testing.T) {
	var schema struct {
		Required          []string
		DependentRequired map[string][]string
	}
	if err := json.Unmarshal(formatWithMeter().Schema("a test"), &schema); err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{"speed": {"lanes"}, "shape": {"lanes"}}
	if len(schema.Required) > 0 || !reflect.DeepEqual(schema.DependentRequired, want) {
		t.Errorf("it requires %v, and %v; want %v", schema.Required, schema.DependentRequired, want)
	}
}

// All faults are reported at once, in the order of the lines, regardless of the package that found
// them.
func TestFaultsOfASection(t *testing.T) {
	_, faults := read(t, formatWithMeter(), `lanes: [{name: a}]
meter:
  interval: 2m
  intervall: 5s
  lanes:
    - {color: red}
    - {color: gren}
    - {color: red}
    - {}
  shape: {kind: rund}
metre: {}
interval: 5s
speed: 0
`, "meter: {interval: 3s}\n")
	requireFaults(t, faults,
		`0.yaml:3:13: error: meter.interval: interval 2m is out of range, want 1s to 1m`,
		`0.yaml:4:3: error: meter.intervall: unknown key "intervall"; did you mean "interval"?`,
		`0.yaml:7:15: error: meter.lanes[1].color: gren is no color; write red`,
		`0.yaml:8:15: error: meter.lanes[2].color: red is counted twice; remove one of them`,
		`0.yaml:9:7: error: meter.lanes[3]: key "color" is missing; add for example color: red`,
		`0.yaml:10:17: error: meter.shape.kind: unknown kind "rund", want round or flat; did you mean "round"?`,
		`0.yaml:11:1: error: metre: unknown key "metre"; did you mean "meter"?`,
		`0.yaml:12:1: error: interval: unknown key "interval"; this key belongs in meter.interval`,
		`0.yaml:13:8: error: speed: speed 0 is out of range, want 1 to 100`,
		`1.yaml:1:19: error: meter.interval: interval is set already at 0.yaml:3:13; keep one of them`,
	)
}

// The only fault of an empty file is that it lacks the required keys at the top.
func TestEmpty(t *testing.T) {
	c, faults := read(t, formatWithMeter(), "# nothing\n")
	requireFaults(t, faults, `0.yaml: error: the configuration is empty; it needs at least lanes`)
	if c.Said {
		t.Error("an empty file says something")
	}
}

// The schema of a section has definitions of its own, also where the top has one of that name.
func TestSchemaOfASection(t *testing.T) {
	var schema struct {
		Properties map[string]struct {
			Ref         string `json:"$ref"`
			Description string
			Examples    []any
		}
		Defs map[string]struct {
			Properties map[string]map[string]any
			Required   []string
		} `json:"$defs"`
	}
	text := formatWithMeter().Schema("a test")
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	section := schema.Properties["meter"]
	if section.Ref != "#/$defs/meter" || section.Description != "Counts packets." || len(section.Examples) != 1 {
		t.Errorf("the section is %+v", section)
	}
	if d := schema.Defs["meter"].Properties["interval"]; d["default"] != "10s" {
		t.Errorf("meter.interval is %v", d)
	}
	if d := schema.Defs["meter.probe"]; !slices.Equal(d.Required, []string{"color"}) || d.Properties["color"]["enum"] == nil {
		t.Errorf("meter.lanes[] is %v", d)
	}
	if schema.Defs["shape"].Properties == nil || schema.Defs["meter.shape"].Properties == nil {
		t.Errorf("the definitions are %s", text)
	}
}

func TestReferenceOfASection(t *testing.T) {
	text := string(formatWithMeter().Reference())
	for _, line := range []string{
		"| `meter` | mapping |  |  | Counts packets. | `{interval: 5s}` |",
		"## `meter`",
		"| `interval` | duration, 1s to 1m | in the value | `10s` | How often it counts. | `5s` |",
		"## `meter.lanes[]`",
		"| `color` | color |  | required | The color. | `red` |",
		"The keys are the same as in `lanes[].shape`.", // said for shape, and for meter.shape
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("the reference lacks %s\n%s", line, text)
		}
	}
}

func TestNearest(t *testing.T) {
	for _, c := range []struct{ word, want string }{
		{"portt", "port"}, {"prot", "port"}, {"Weight", "weight"}, {"on-no-backend", "on_no_backend"}, {"zzz", ""}, {"", ""}, {"x", ""},
	} {
		if got := Nearest(c.word, []string{"port", "weight", "on_no_backend"}); got != c.want {
			t.Errorf("nearest to %q is %q, want %q", c.word, got, c.want)
		}
	}
}

// A fault about a missing key names the section that lacks it.
func TestWhatIsNotWrittenHasAPlace(t *testing.T) {
	c, faults := read(t, formatWithMeter(), "\nlanes:\n  - {name: a}\nmeter: {}\n")
	requireFaults(t, faults)
	root := c.Settings["root"].(*rootEntry)
	lane := &root.Lanes.Items[0]
	section := builtMeter
	for name, position := range map[string][2]Position{
		"speed": {root.Speed.At, root.At}, "shape.kind": {root.Shape.Kind.At, root.At},
		"lanes[0].ports": {lane.Ports.At, lane.At}, "lanes[0].ports[0]": {lane.Ports.Items[0].At, lane.At},
		"lanes[0].shape.kind": {lane.Shape.Kind.At, lane.At},
		"meter.interval":      {section.Interval.At, section.At}, "meter.shape.kind": {section.Shape.Kind.At, section.At},
	} {
		if position[0] != position[1] || position[0].line == 0 {
			t.Errorf("%s is at %v, want %v", name, position[0], position[1])
		}
	}
	if root.At.line != 2 || lane.At.line != 3 || section.At.line != 4 {
		t.Errorf("the mappings are at %v, %v and %v", root.At, lane.At, section.At)
	}
}

// TestListen: addresses that can be listened at are read, and the others get advice.
func TestListen(t *testing.T) {
	for text, want := range map[string]string{
		"127.0.0.1:9470":          "127.0.0.1:9470",
		"[::]:9470":               "[::]:9470",
		"0.0.0.0:1":               "0.0.0.0:1",
		"[2001:db8::1]:65535":     "[2001:db8::1]:65535",
		":9470":                   `found text ":9470", want an IP address and a port, such as 127.0.0.1:9470; write "127.0.0.1:9470" for this machine alone, or "[::]:9470" for every address`,
		"localhost:9470":          `found text "localhost:9470", want an IP address and a port, such as 127.0.0.1:9470; write "127.0.0.1:9470"`,
		"9470":                    `found text "9470", want an IP address and a port, such as 127.0.0.1:9470; write "127.0.0.1:9470"`,
		"10.0.0.1":                `found text "10.0.0.1", want an IP address and a port, such as 127.0.0.1:9470; write it with a port: "10.0.0.1:9470"`,
		"2001:db8::1":             `found text "2001:db8::1", want an IP address and a port, such as 127.0.0.1:9470; write it with a port: "[2001:db8::1]:9470"`,
		"10.0.0.1:0":              "10.0.0.1:0 has port 0, which is a different port each time; write the port",
		"10.0.0.1:70000":          `found text "10.0.0.1:70000", want an IP address and a port, such as 127.0.0.1:9470`,
		"[::ffff:10.0.0.1]:9470":  "[::ffff:10.0.0.1]:9470 is an IPv4 address in IPv6 form; write 10.0.0.1:9470",
		"[fe80::1%eth0]:9470":     "[fe80::1%eth0]:9470 is a link-local address; write a global or unique local address",
		"[fe80::1]:9470":          "[fe80::1]:9470 is a link-local address; write a global or unique local address",
		"224.0.0.1:9470":          "224.0.0.1:9470 is a multicast address; write a unicast address",
		"metrics.example.org:123": `found text "metrics.example.org:123", want an IP address and a port, such as 127.0.0.1:9470`,
	} {
		var l Listen
		got := ""
		if c := l.Read(Scalar{KindText, text}, &Field{Example: "127.0.0.1:9470"}); c == nil {
			got = l.Value.String()
		} else if got = c.Message; c.Suggestion != "" {
			got += "; " + c.Suggestion
		}
		if got != want {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// A file with very many mistakes takes no longer than reading it, and few of its faults are kept.
// Before reading ended after a number of faults, each of these took ten seconds and more.
func TestVeryManyMistakes(t *testing.T) {
	many := func(one string) string {
		var all strings.Builder
		for i := range 20_000 {
			fmt.Fprintf(&all, one, i)
		}
		return all.String()
	}
	for what, text := range map[string]string{
		"unknown keys at the top":        "lanes: [{name: a}]\n" + many("unknown%d: 1\n"),
		"unknown keys on one line":       "{lanes: [{name: a}]," + many("unknown%d: 1,") + "}\n",
		"unknown keys in a mapping":      "lanes: [{name: a," + many("unknown%d: 1,") + "}]\n",
		"entries without what they need": "lanes: [" + many("{ports: %d},") + "]\n",
		"bad items of a list":            "lanes: [{name: a, ports: [" + many("x%d,") + "]}]\n",
		"bad items, and nothing else":    "meter: {lanes: [" + many("{color: red, at: %d},") + "]}\n",
		"good items that mean nothing":   "meter: {lanes: [" + strings.ReplaceAll(many("{color: red%d},"), "red", "blue") + "]}\n",
	} {
		begin := time.Now()
		c, _ := read(t, formatWithMeter(), text)
		faults := c.Faults.Sorted()
		var shown strings.Builder
		if err := Render(&shown, faults); err != nil {
			t.Fatal(err)
		}
		if len(faults) < FaultsMax || len(faults) > FaultsMax+3 || shown.Len() > 100_000 {
			t.Errorf("%s: %d faults, %d bytes are shown; want about %d faults", what, len(faults), shown.Len(), FaultsMax)
		}
		if took := time.Since(begin); took > 30*time.Second { // it takes a tenth of a second
			t.Errorf("%s: it took %s", what, took)
		}
	}
}

// Faults that are added after reading are also kept up to a number, and counted beyond it.
func TestManyFaultsOfMeaning(t *testing.T) {
	c, _ := read(t, formatWithMeter(), "meter: {}\n")
	for i := range 3 * FaultsMax {
		c.Faults.Warnf(Mark{At: Position{file: &file{name: "a.yaml"}}}, "", "warning %d", i)
	}
	c.Faults.Errorf(Mark{At: Position{file: &file{name: "a.yaml"}}}, "", "an error")
	faults := c.Faults.Sorted()
	if last := faults[len(faults)-1]; len(faults) != FaultsMax+2 || !HasErrors(faults) || last.Message != "2000 more faults of this severity are not shown" || last.Severity != SeverityWarning {
		t.Errorf("of %d faults the last is %v", len(faults), last)
	}
	if again := c.Faults.Sorted(); len(again) != len(faults) {
		t.Errorf("sorted again there are %d faults", len(again))
	}
}

// The excerpt of a long line is around the column, and of a short one all of it.
func TestWindow(t *testing.T) {
	long := strings.Repeat("ä", 1_000_000)
	for _, c := range []struct {
		line          string
		column        int
		want          string
		start, length int
		cut           bool
	}{
		{"abc", 1, "abc", 0, 3, false}, {"abc", 4, "abc", 3, 3, false}, {"abc", 9, "abc", 3, 3, false}, {"", 1, "", 0, 0, false},
		{"a\tb\x00", 2, "a b\uFFFD", 1, 4, false},
		{long, 1, "", 0, 2 * excerptColumns, false}, {long, 500_000, "", excerptColumns / 2, 2 * excerptColumns, true},
		{long, 1_000_001, "", excerptColumns / 2, excerptColumns / 2, true}, {"\xff\xfe\xfd", 2, "\uFFFD\uFFFD\uFFFD", 1, 3, false},
	} {
		part, start, cut := window(c.line, c.column)
		if c.want != "" && string(part) != c.want || len(part) != c.length || start != c.start || cut != c.cut {
			t.Errorf("%.9q, column %d: %.20q of %d characters, column %d, cut %t; want %+.20q", c.line, c.column, string(part), len(part), start, cut, c.want)
		}
	}
}
