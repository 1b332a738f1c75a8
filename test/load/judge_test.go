package load

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// at is a moment of the stories below, in milliseconds.
func at(ms int) time.Time { return time.Unix(1000, 0).Add(time.Duration(ms) * time.Millisecond) }

func judged(events []*Event, late []span, f Failure) (Report, bool) {
	r := Report{events: events, Allowed: map[string]int{}}
	left := r.judge([]Failure{f}, &clock{late: late, due: time.Now().Add(time.Hour)})
	return r, len(left) == 1
}

// TestJudge: the judge tells failures from losses that an event or the machine explains.
func TestJudge(t *testing.T) {
	removal := []*Event{{Name: "b2 removed", Begin: at(5000), End: at(6000), May: []Permission{{Service: "web", Backend: "b2"}}}}
	drain := []*Event{{Name: "b2 drains", Begin: at(5000), End: at(6000), May: []Permission{{Service: "web", Backend: "b2", UDP: true}}}}
	going := []*Event{{Name: "going on", Begin: at(5000), May: []Permission{{Service: "web"}}}}
	fresh := []*Event{{Name: "few ports", Begin: at(5000), End: at(6000), May: []Permission{{Service: "web", New: true}}}}
	kill := []*Event{{Name: "kill -9", Begin: at(5000), End: at(6000)}}
	broken := func(kind Kind, service, backend string, begun, when int) Failure {
		return Failure{flow: flow{kind: kind, service: service, backend: backend, begun: at(begun)}, What: "broken", At: at(when), Err: errors.New("reset")}
	}
	stall := func(what string, from, to int) Failure {
		return Failure{flow: flow{kind: KeepAlive, service: "web", backend: "b1", begun: at(0)}, What: what, Since: at(from), At: at(to)}
	}
	for name, c := range map[string]struct {
		events []*Event
		late   []span
		f      Failure
		counts bool
	}{
		"nothing was done":                    {nil, nil, broken(New, "web", "b1", 0, 100), true},
		"a flow of what was removed":          {removal, nil, broken(KeepAlive, "web", "b2", 0, 5500), false},
		"noticed later":                       {removal, nil, broken(KeepAlive, "web", "b2", 0, 9000), false},
		"before it was removed":               {removal, nil, broken(KeepAlive, "web", "b2", 0, 4900), true},
		"begun after it was removed":          {removal, nil, broken(KeepAlive, "web", "b2", 6100, 7000), true},
		"a flow of another backend":           {removal, nil, broken(KeepAlive, "web", "b1", 0, 5500), true},
		"of another service":                  {removal, nil, broken(KeepAlive, "dns", "b2", 0, 5500), true},
		"nobody had answered yet":             {removal, nil, broken(New, "web", "", 5400, 5500), false},
		"nobody had answered, and afterwards": {removal, nil, broken(New, "web", "", 6100, 6500), true},
		"UDP of a backend that drains":        {drain, nil, broken(UDP, "web", "b2", 0, 5500), false},
		"TCP of a backend that drains":        {drain, nil, broken(KeepAlive, "web", "b2", 0, 5500), true},
		"an event that goes on":               {going, nil, broken(UDP, "web", "b3", 8000, 9000), false},
		"one that was answered":               {fresh, nil, broken(New, "web", "b1", 5100, 5500), true},
		"one that was not":                    {fresh, nil, broken(New, "web", "", 5100, 5500), false},
		"a kill allows nothing":               {kill, nil, broken(KeepAlive, "web", "b1", 0, 5500), true},
		"a stall":                             {nil, nil, stall("stall", 1000, 2100), true},
		"a stall of the machine":              {nil, []span{{at(900), at(1200)}}, stall("stall", 1000, 2100), false},
		"a stall, and a little of it machine": {nil, []span{{at(900), at(1200)}}, stall("stall", 1000, 2300), true},
		"a lost datagram":                     {nil, []span{{at(1000), at(1100)}}, stall("lost", 1000, 2000), true},
		"one that the machine lost":           {nil, []span{{at(1000), at(1400)}}, stall("lost", 1000, 2000), false},
	} {
		r, counts := judged(c.events, c.late, c.f)
		if counts != c.counts {
			t.Errorf("%s: counts %v, want %v: %s", name, counts, c.counts, r.Explain(c.f))
		}
	}
	r, _ := judged(kill, nil, broken(KeepAlive, "web", "b1", 0, 5500))
	text := r.Explain(broken(KeepAlive, "web", "b1", 0, 5500))
	for _, word := range []string{"keep-alive", "web", "b1", "begun 5.5s before", "reset", `during "kill -9", begun 500ms before`} {
		if !strings.Contains(text, word) {
			t.Errorf("the explanation lacks %q: %s", word, text)
		}
	}
}

// TestMayBreak: the model allows the failures of removed backends, and none of the others.
func TestMayBreak(t *testing.T) {
	before := plain()
	same := before.clone()
	same.order = []int{4, 2, 1, 3}
	same.members[direct.name][1] = member{weight: 7, name: "green"}
	same.extra = []int{1}
	if may := before.mayBreak(same); len(may) != 0 {
		t.Errorf("other weights, names, order and services may break %v", may)
	}
	less := before.clone()
	delete(less.members[translated.name], 3)
	less.members[direct.name][2] = member{}
	less.members[translated.name][2] = member{}
	want := map[Permission]bool{{Service: translated.name, Backend: "b3"}: true, {Service: direct.name, Backend: "b2", UDP: true}: true}
	for _, p := range before.mayBreak(less) {
		if !want[p] {
			t.Errorf("not expected: %+v", p)
		}
		delete(want, p)
	}
	if len(want) != 0 {
		t.Errorf("missing: %v", want)
	}
}
