package load

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// edits are operators' changes of the file between two reloads.
var edits = []struct {
	name string
	do   func(c *config, r *rand.Rand)
}{
	{"nothing", func(*config, *rand.Rand) {}},
	{"add", func(c *config, r *rand.Rand) {
		s, n := anyService(r), anyBackend(r)
		if _, there := c.members[s][n]; !there {
			c.members[s][n] = member{weight: 1 + r.IntN(3)}
		}
	}},
	{"remove", func(c *config, r *rand.Rand) {
		s, n := anyService(r), anyBackend(r)
		if c.serving(s, n) >= 1 {
			delete(c.members[s], n)
		}
	}},
	{"reweight", func(c *config, r *rand.Rand) {
		s, n := anyService(r), anyBackend(r)
		if m, there := c.members[s][n]; there && c.serving(s, n) >= 1 {
			m.weight = r.IntN(4)
			c.members[s][n] = m
		}
	}},
	{"rename", func(c *config, r *rand.Rand) {
		s, n := anyService(r), anyBackend(r)
		if m, there := c.members[s][n]; there {
			m.name = fmt.Sprintf("name-%d-%d", n, r.IntN(3))
			c.members[s][n] = m
		}
	}},
	{"resize", func(c *config, r *rand.Rand) {
		c.sizes[anyService(r)] = []int{251, 509, 4093}[r.IntN(3)]
	}},
	{"reorder", func(c *config, r *rand.Rand) {
		r.Shuffle(len(c.order), func(i, j int) { c.order[i], c.order[j] = c.order[j], c.order[i] })
	}},
	{"another service", func(c *config, r *rand.Rand) {
		if c.extra = nil; r.IntN(2) == 0 {
			c.extra = []int{anyBackend(r)}
		}
	}},
}

func anyService(r *rand.Rand) string { return []string{translated.name, direct.name}[r.IntN(2)] }
func anyBackend(r *rand.Rand) int    { return 1 + r.IntN(backendCount) }

// serving is the number of backends, without one, that take new flows of a service.
func (c config) serving(service string, but int) (count int) {
	for n, m := range c.members[service] {
		if n != but && m.weight > 0 {
			count++
		}
	}
	return count
}

// mayWrite is the other half of the model: the map entries that a change concerns. A key names
// an entry and its owner, in the words of the witness.
func (c config) mayWrite(b *bed, after config) map[string]bool {
	may := map[string]bool{}
	for _, s := range []string{translated.name, direct.name} {
		if fmt.Sprint(c.members[s]) != fmt.Sprint(after.members[s]) || c.sizes[s] != after.sizes[s] {
			may["service "+s], may["slots "+s], may["table "] = true, true, true
		}
	}
	if fmt.Sprint(c.extra) != fmt.Sprint(after.extra) {
		for _, key := range []string{"service extra", "slots extra", "table ", "frontend 192.0.2.77", "address 192.0.2.77"} {
			may[key] = true
		}
	}
	for n := 1; n <= backendCount; n++ {
		for _, family := range []struct {
			address string
			ipv4    bool
		}{{b.Backends[n-1].Addr4().String(), true}, {b.Backends[n-1].Addr6().String(), false}} {
			if c.use(n, family.ipv4) != after.use(n, family.ipv4) {
				may["backend "+family.address] = true
			}
		}
	}
	return may
}

// use is the contents of a backend's own record: whether it exists, and whether it takes new
// flows of any service.
func (c config) use(n int, ipv4 bool) (use struct{ there, serves bool }) {
	for _, members := range c.members {
		if m, there := members[n]; there {
			use.there, use.serves = true, use.serves || m.weight > 0
		}
	}
	if ipv4 && slices.Contains(c.extra, n) {
		use.there, use.serves = true, true
	}
	return use
}

// writes returns the writes that the witness has recorded since the last call.
func (p *proof) writes(t *testing.T, from *int) (all []write) {
	t.Helper()
	text, err := os.ReadFile(p.path + ".writes")
	p.must(err)
	for line := range strings.Lines(string(text[*from:])) {
		if !strings.HasSuffix(line, "\n") {
			break // it is being written; the next call reads it
		}
		var w write
		p.must(json.Unmarshal([]byte(line), &w))
		all = append(all, w)
		*from += len(line)
	}
	return all
}

// TestReloads: after random changes of the file under the load, no flow fails that the change
// does not concern, and no entry of a map is written with its old value.
func TestReloads(t *testing.T) {
	quiet := 3 * time.Second
	if soak {
		quiet = time.Minute
	}
	p := begin(t, setup{how: watchedHow, quiet: quiet})
	random := p.random
	seen := 0
	p.writes(t, &seen)
	done := map[string]int{}
	var written, slots int
	for i := range times(10000, 60) {
		after := p.config.clone()
		var names []string
		for range 1 + random.IntN(2) {
			e := edits[random.IntN(len(edits))]
			e.do(&after, random)
			names = append(names, e.name)
			done[e.name]++
		}
		name := strings.Join(names, " and ")
		p.apply(p.load, name, p.config, after)
		may := p.config.mayWrite(p.bed, after)
		for _, w := range p.writes(t, &seen) {
			written++
			if w.What == "slots" {
				slots++
			}
			switch {
			case w.Again:
				p.wrong("reload %d (%s): %s of %s was written though it was there already", i, name, w.What, w.Of)
			case !may[w.What+" "+w.Of]:
				p.wrong("reload %d (%s): %s of %s was written, which the change is not about", i, name, w.What, w.Of)
			}
		}
		p.config = after
		time.Sleep(p.upTo(50 * time.Millisecond))
	}
	t.Logf("edits: %v; %d writes, %d of them runs of slots", done, written, slots)
	if slots == 0 || written == slots {
		t.Errorf("%d writes, %d of them of slots: the changes changed too little to prove anything", written, slots)
	}
	report(t, p.end())
}

// TestSecondDaemonUnderLoad: a second daemon of the instance refuses to start under load,
// names the first, and disturbs nothing.
func TestSecondDaemonUnderLoad(t *testing.T) {
	p := begin(t, setup{how: "shunt", quiet: 2 * time.Second})
	first := p.daemon
	for range times(20, 3) {
		end := p.load.Event("a second daemon")
		p.launch()
		second := p.daemon
		p.daemon = first
		p.refused(second, fmt.Sprintf("is already run by process %d;", first.Process.Pid))
		end()
	}
	report(t, p.end())
}

// refused waits for the end of a process that must fail with a text.
func (p *proof) refused(second *lab.Process, text string) {
	p.t.Helper()
	select {
	case <-second.Ended:
	case <-time.After(patience):
		_ = second.End(9, patience)
		p.t.Fatalf("the second daemon runs:\n%s", second.Log())
	}
	if code := second.ProcessState.ExitCode(); code != 1 || !strings.Contains(second.Log(), text) {
		p.wrong("the second daemon: exit code %d, want 1 and the words %q:\n%s", code, text, second.Log())
	}
}
