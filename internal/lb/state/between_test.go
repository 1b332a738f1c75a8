package state

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

func nodesOf(prefixes ...string) *model.Decapsulation {
	d := &model.Decapsulation{Tunnelled: true}
	for _, p := range prefixes {
		d.From = append(d.From, netip.MustParsePrefix(p))
		d.Nodes = append(d.Nodes, netip.MustParsePrefix(p).Addr())
	}
	return d
}

// TestBetweenNodes: a source declares direct return between nodes, changes it with and without services, and ends it.
func TestBetweenNodes(t *testing.T) {
	w := NewWriter()
	step := func(what string, changes bool, want model.Decapsulation, declared ...Declaration) {
		t.Helper()
		before := w.Snapshot().Revision
		next, err := w.Try(declared...)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		revision, err := w.Replace(declared...)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if (revision > before) != changes {
			t.Errorf("%s: revision %d after %d", what, revision, before)
		}
		if s := w.Snapshot(); !s.Decapsulation.Equal(want) || !next.Decapsulation.Equal(want) {
			t.Errorf("%s: decapsulation is %+v, and was tried as %+v; want %+v", what, s.Decapsulation, next.Decapsulation, want)
		}
	}
	one, two := nodesOf("10.0.0.1/32"), nodesOf("10.0.0.1/32", "10.0.0.2/32")
	step("the file", true, model.Decapsulation{}, configuration("file", model.Config{Node: model.Node{StampProbes: true}}))
	step("one node", true, *one, Declaration{Source: "cluster", Decapsulation: one})
	step("the same", false, *one, Declaration{Source: "cluster", Decapsulation: one})
	step("services alone", true, *one, Declaration{Source: "cluster", Services: services("web", frontend("192.0.2.10", 80, 80)), Part: true})
	step("a second node", true, *two, Declaration{Source: "cluster", Part: true, Decapsulation: two})
	two.Nodes[0] = netip.MustParseAddr("10.0.0.9") // the writer has its own
	step("the file again", true, *nodesOf("10.0.0.1/32", "10.0.0.2/32"), configuration("file", model.Config{}))
	step("its end", true, model.Decapsulation{}, Declaration{Source: "cluster", Part: true, Decapsulation: &model.Decapsulation{}})
	own := model.Decapsulation{From: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}}
	step("the file's own", true, own, configuration("file", model.Config{Node: model.Node{Decapsulation: own}}))
}

// TestBetweenNodesConflicts: two sources, or the node's own servers, cannot have the same packets.
func TestBetweenNodesConflicts(t *testing.T) {
	own := model.Node{Decapsulation: model.Decapsulation{From: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}}}
	file, cluster := Declaration{Source: "file", Node: &own}, Declaration{Source: "cluster", Decapsulation: nodesOf("10.0.0.1/32")}
	for _, c := range []struct {
		name          string
		steps         [][]Declaration // all but the last are taken
		source, owner string
		object        string
	}{
		{"two sources", [][]Declaration{{cluster}, {{Source: "other", Decapsulation: nodesOf("10.0.0.1/32")}}}, "other", "cluster", "direct return between nodes"},
		{"after the file", [][]Declaration{{file}, {cluster}}, "cluster", "file", "direct return between nodes"},
		{"with the file", [][]Declaration{{file, cluster}}, "cluster", "file", "direct return between nodes"},
		{"before the file", [][]Declaration{{cluster}, {file}}, "file", "cluster", "`decapsulation`"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := NewWriter()
			last := len(c.steps) - 1
			for _, declared := range c.steps[:last] {
				if _, err := w.Replace(declared...); err != nil {
					t.Fatal(err)
				}
			}
			before := w.Snapshot()
			_, err := w.Replace(c.steps[last]...)
			var conflict *ConflictError
			if !errors.As(err, &conflict) || conflict.Source != c.source || conflict.Owner != c.owner || conflict.Object != c.object {
				t.Errorf("got %v; want %s to be refused %s of %s", err, c.source, c.object, c.owner)
			}
			if w.Snapshot() != before {
				t.Error("a refused declaration changed the state")
			}
		})
	}
}

// TestTunnelledFrontends: a frontend of packets between nodes is another one than that of clients at the same address and port, and a
// port at all addresses is another one than that at one address.
func TestTunnelledFrontends(t *testing.T) {
	tunnelled := func(address string) model.Frontend {
		return model.Frontend{Address: netip.MustParseAddr(address), Protocol: model.TCP | model.Tunnelled, Ports: value.PortRange{First: 80, Last: 80}}
	}
	w := NewWriter()
	for _, d := range []Declaration{
		{Source: "file", Services: services("web", frontend("192.0.2.10", 80, 80))},
		{Source: "a", Services: services("inner", tunnelled("192.0.2.10"))},
		{Source: "b", Services: services("port", tunnelled("0.0.0.0"), tunnelled("::"))},
	} {
		if _, err := w.Replace(d); err != nil {
			t.Fatal(err)
		}
	}
	var conflict *ConflictError
	if _, err := w.Replace(Declaration{Source: "c", Services: services("other", tunnelled("::"))}); !errors.As(err, &conflict) || conflict.Object != "frontend tcp-tunnelled [::]:80" {
		t.Errorf("got %v, want a conflict about the port at all addresses", err)
	}
}
