package cost

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/packet"
)

var (
	approve = flag.String("approve", "", "the reason why packets may cost what they do now: write packets.txt with it, instead of comparing")
	where   = flag.Int("where", 0, "with -v: print for each packet so many functions, files and lines that have the most of its instructions")
)

const packetsFile = "packets.txt"

// journeys is the record of packets: costs by packet and variant.
type journeys map[string]approved

// approved is a cost with its reason.
type approved struct {
	cost
	reason string
}

// TestNoPacketCostsMoreUnapproved counts the instructions, look-ups and calls for each packet, see counted_test.go.
func TestNoPacketCostsMoreUnapproved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes a network namespace")
	}
	if strings.ContainsAny(*approve, "|\n") {
		t.Fatalf("the reason %q must be one line without |", *approve)
	}
	now := map[string]cost{}
	for _, direct := range []bool{true, false} {
		packets, world := natPackets(), "nat"
		if direct {
			packets, world = directPackets(), "direct"
		}
		t.Run(world, func(t *testing.T) { measure(t, newWorld(t, world, services(direct)), packets, now) })
	}
	if t.Failed() {
		return
	}
	before := readJourneys(t)
	if *approve != "" {
		must(t, os.WriteFile(packetsFile, []byte(before.now(now, *approve).String()), 0o644))
		return
	}
	complaints := before.compare(now)
	for _, c := range complaints {
		t.Error(c)
	}
	same := maps.EqualFunc(now, before, func(c cost, a approved) bool { return c.equal(a.cost) })
	if len(complaints) > 0 || !same {
		what := "some packets have become cheaper; to keep them so"
		if len(complaints) > 0 {
			what = "if this is meant"
		}
		t.Logf("%s, say why: make approve-packets REASON='...'. The packets now:\n%s", what, before.now(now, "…"))
	}
}

// measure counts for each packet, with the features that the world's services need and with all; and for some packets
// with stamps of probes.
func measure(t *testing.T, w *world, packets []sent, into map[string]cost) {
	now := jiffies(t)
	for _, v := range []struct {
		name     string
		features uint32
		program  string
	}{{"needed", 0, programXDP}, {"all", ^uint32(0), programXDP}, {"stamps", 0, programStamps}} {
		c := w.load(v.features, v.program)
		for _, s := range packets {
			if v.program == programStamps && !s.stamps {
				continue
			}
			first := c.measure(s, now)
			if again := c.measure(s, now); !first.equal(again) {
				t.Errorf("%s (%s) costs %v, and the second time %v", s.name, v.name, first, again)
			}
			into[s.name+" "+v.name] = first
			if *where > 0 {
				t.Logf("%s (%s): %d instructions", s.name, v.name, first.instructions)
				for _, list := range c.portions() {
					for _, p := range list[:min(*where, len(list))] {
						t.Logf("  %5d %s", p.instructions, p.name)
					}
				}
			}
		}
	}
}

// measure sends a packet, and the packets before it, through the counting program and through the plain one, and
// compares their results.
func (c *copies) measure(s sent, now uint64) cost {
	c.Helper()
	const random = 0x5eed5eed
	chain := s.before
	if chain == nil {
		chain = []packet.Packet{s.in}
	}
	c.forget()
	must(c, c.begin(now, random))
	for _, p := range chain {
		c.run(c.program, packet.Must(p))
	}
	must(c, c.begin(now+s.later*uint64(c.second), random))
	frame := packet.Must(s.in)
	verdict, out := c.run(c.program, frame)
	got, err := c.end()
	must(c, err)
	if got.lookups["?"] > 0 {
		c.Fatalf("%s: of a look-up it is not clear in which map it is: %v", s.name, got.lookups)
	}
	if verdict != s.verdict {
		c.Fatalf("%s: the verdict is %d, want %d", s.name, verdict, s.verdict)
	}
	c.forget()
	must(c, c.d.Heartbeat())
	for _, p := range chain {
		c.run(c.plain, packet.Must(p))
	}
	before := c.reasons()
	plainVerdict, plainOut := c.run(c.plain, frame)
	if reason := moved(before, c.reasons()); reason != s.reason {
		c.Fatalf("%s: the program gives %q for its reason, want %q", s.name, reason, s.reason)
	}
	if plainVerdict != verdict || !bytes.Equal(plainOut, out) {
		c.Fatalf("%s: the program that counts says %d and sends\n%x\nand the one that does not says %d and sends\n%x", s.name, verdict, out, plainVerdict, plainOut)
	}
	return got
}

// reasons returns the count of packets for each reason.
func (w *world) reasons() map[string]kernel.Count {
	counters, err := w.d.Counters()
	must(w, err)
	return counters.Reasons
}

// moved names the reasons whose count has changed.
func moved(before, now map[string]kernel.Count) string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if now[name].Packets != before[name].Packets {
			names = append(names, name)
		}
	}
	return strings.Join(names, " ")
}

// equal reports whether the costs are the same.
func (c cost) equal(d cost) bool {
	return c.instructions == d.instructions && maps.Equal(c.lookups, d.lookups) && maps.Equal(c.calls, d.calls)
}

func total(m map[string]int) (sum int) {
	for _, n := range m {
		sum += n
	}
	return sum
}

// grown names the figures that are larger than before.
func (c cost) grown(before cost) (what []string) {
	more := func(name string, now, before int) {
		if now > before {
			what = append(what, fmt.Sprintf("%d %s, %d before", now, name, before))
		}
	}
	more("instructions", c.instructions, before.instructions)
	for _, name := range slices.Sorted(maps.Keys(c.lookups)) {
		more("look-ups in "+name, c.lookups[name], before.lookups[name])
	}
	for _, name := range slices.Sorted(maps.Keys(c.calls)) {
		more("calls of "+name, c.calls[name], before.calls[name])
	}
	return what
}

// compare lists the costs that must be approved.
func (j journeys) compare(now map[string]cost) (complaints []string) {
	for _, name := range slices.Sorted(maps.Keys(now)) {
		was, ok := j[name]
		if !ok {
			complaints = append(complaints, name+" is not in the record")
			continue
		}
		for _, what := range now[name].grown(was.cost) {
			complaints = append(complaints, name+" costs more: "+what)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(j)) {
		if _, ok := now[name]; !ok {
			complaints = append(complaints, name+" is in the record, and no longer measured")
		}
	}
	return complaints
}

// now is the record with these costs. A packet with an unchanged cost keeps its reason.
func (j journeys) now(costs map[string]cost, reason string) journeys {
	out := journeys{}
	for name, c := range costs {
		was, ok := j[name]
		if !ok || !was.equal(c) {
			was = approved{c, reason}
		}
		out[name] = was
	}
	return out
}

const packetsHead = `# The cost of packets: the instructions and calls that sh_xdp runs for each packet, on any kernel. test/cost fails on
# growth; ` + "`make approve-packets REASON='...'`" + ` approves it, and writes the reason to the changed lines.
#
# variant: features of the program. needed: the features that the services of the test need. all: all features.
# stamps, of some packets: as needed, with stamps of probes. instructions: the compiler's instructions that run
# (counted_test.go says what kernels change). look-ups: calls of bpf_map_lookup_elem. calls: calls of other helpers.
# Next come the maps of the look-ups and the names of the helpers, with their counts.
#
`

// String is the text of packets.txt.
func (j journeys) String() string {
	var out strings.Builder
	out.WriteString(packetsHead)
	fmt.Fprintf(&out, "#%-37s %-7s %12s %8s %5s | look-ups | calls | reason\n", "packet", "variant", "instructions", "look-ups", "calls")
	for _, key := range slices.Sorted(maps.Keys(j)) {
		name, variant, _ := strings.Cut(key, " ")
		a := j[key]
		fmt.Fprintf(&out, "%-38s %-7s %12d %8d %5d | %s | %s | %s\n", name, variant, a.instructions, total(a.lookups), total(a.calls),
			listed(a.lookups), listed(a.calls), a.reason)
	}
	return out.String()
}

// listed is "sh_flows:2 sh_known:1".
func listed(m map[string]int) string {
	if len(m) == 0 {
		return "-"
	}
	var list []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		list = append(list, fmt.Sprintf("%s:%d", name, m[name]))
	}
	return strings.Join(list, " ")
}

func readJourneys(t *testing.T) journeys {
	t.Helper()
	text, err := os.ReadFile(packetsFile)
	if err != nil && !(errors.Is(err, os.ErrNotExist) && *approve != "") {
		t.Fatal(err)
	}
	j, err := parseJourneys(string(text))
	if err != nil {
		t.Fatalf("%s: %v", packetsFile, err)
	}
	return j
}

func parseJourneys(text string) (journeys, error) {
	j := journeys{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		parts := strings.Split(line, " | ")
		if len(parts) != 4 || parts[3] == "" {
			return nil, fmt.Errorf("%q: want figures, look-ups, calls and a reason", line)
		}
		var name, variant string
		var lookups, calls int
		a := approved{reason: parts[3]}
		if n, err := fmt.Sscan(parts[0], &name, &variant, &a.instructions, &lookups, &calls); n != 5 || err != nil {
			return nil, fmt.Errorf("%q: want a packet, a variant and three numbers", line)
		}
		var errs [2]error
		a.lookups, errs[0] = parseList(parts[1], lookups)
		a.calls, errs[1] = parseList(parts[2], calls)
		if err := errors.Join(errs[:]...); err != nil {
			return nil, fmt.Errorf("%q: %w", line, err)
		}
		j[name+" "+variant] = a
	}
	return j, nil
}

// parseList is the inverse of listed.
func parseList(text string, sum int) (map[string]int, error) {
	m := map[string]int{}
	for _, item := range strings.Fields(text) {
		if item == "-" {
			continue
		}
		name, count, _ := strings.Cut(item, ":")
		n := 0
		if _, err := fmt.Sscan(count, &n); err != nil {
			return nil, fmt.Errorf("%q is no name with a number", item)
		}
		m[name] = n
	}
	if total(m) != sum {
		return nil, fmt.Errorf("%s adds up to %d, and not to %d", text, total(m), sum)
	}
	return m, nil
}

func TestDearerPacketIsSeen(t *testing.T) {
	one := func(change func(*cost)) cost {
		c := cost{100, map[string]int{"sh_flows": 1}, map[string]int{"jiffies64": 2}}
		change(&c)
		return c
	}
	record := journeys{"a needed": {one(func(*cost) {}), "because"}}
	for _, c := range []struct {
		complaints int
		now        cost
	}{
		{0, one(func(*cost) {})},
		{0, one(func(c *cost) { c.instructions, c.lookups, c.calls = 99, nil, nil })},
		{1, one(func(c *cost) { c.instructions++ })},
		{1, one(func(c *cost) { c.lookups["sh_flows"]++ })},
		{1, one(func(c *cost) { c.lookups = map[string]int{"sh_known": 1} })},
		{1, one(func(c *cost) { c.calls["fib_lookup"] = 1 })},
	} {
		now := map[string]cost{"a needed": c.now}
		if got := record.compare(now); len(got) != c.complaints {
			t.Errorf("%v: %q, want %d complaints", c.now, got, c.complaints)
		}
		reason := "new"
		if c.now.equal(record["a needed"].cost) {
			reason = "because"
		}
		if got := record.now(now, "new")["a needed"].reason; got != reason {
			t.Errorf("%v has the reason %q, want %q", c.now, got, reason)
		}
	}
	if got := record.compare(map[string]cost{"b needed": {}}); len(got) != 2 {
		t.Errorf("with another packet: %q, want that one has come and one has gone", got)
	}
}

func TestPacketsReadBack(t *testing.T) {
	j := journeys{"b all": {cost{7, map[string]int{"sh_b": 2, "sh_a": 1}, map[string]int{}}, "it is so"},
		"a needed": {cost{1, map[string]int{}, map[string]int{"map_update_elem(sh_a)": 3}}, "as before"}}
	got, err := parseJourneys(j.String())
	if err != nil || got.String() != j.String() {
		t.Errorf("read back, %v:\n%s\nwant\n%s", err, got, j)
	}
	for _, line := range []string{"a needed 1 0 0 | - | -", "a needed 1 0 | - | - | why", "a needed 1 2 0 | sh_a:1 | - | why", "a needed 1 1 0 | sh_a | - | why"} {
		if _, err := parseJourneys(line); err == nil {
			t.Errorf("%q is read without complaint", line)
		}
	}
}
