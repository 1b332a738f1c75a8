package command

import (
	"bytes"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/test/golden"
)

func TestChainUsage(t *testing.T) {
	for args, want := range map[string]string{
		"chain show":                   "list, set and clear",
		"chain list eth0":              `unexpected argument "eth0"`,
		"chain list -o yaml":           `not "yaml"`,
		"chain clear":                  "--interface is missing",
		"chain clear --interface eth0": "--position is missing",
		"chain clear --interface eth0 --position between":                                       `not "between"`,
		"chain set --interface eth0 --position after":                                           "--program is missing",
		"chain set --interface eth0 --position after --program filter.o":                        "the whole path",
		"chain set --interface eth0 --position between --program /sys/fs/bpf/filter":            `not "between"`,
		"chain set --interface eth0 --position after --program /sys/fs/bpf/a --instance ../etc": `"../etc"`,
	} {
		var out, errOut bytes.Buffer
		if code := Main(strings.Fields(args), nil, &out, &errOut); code != cli.ExitUsage || !strings.Contains(errOut.String(), want) {
			t.Errorf("shunt %s: exit code %d, want %d, and a message with %q:\n%s", args, code, cli.ExitUsage, want, errOut.String())
		}
	}
}

func TestChainOutput(t *testing.T) {
	all := []attach.Chain{
		{Interface: "eth0", Map: "/sys/fs/bpf/shunt/default/chain-eth0", Attached: 57,
			Before: &attach.Chained{ID: 57, Name: "filter", Tag: "0123456789abcdef"},
			Shunt:  &attach.Chained{ID: 60, Name: "sh_xdp", Tag: "fedcba9876543210"},
			After:  &attach.Chained{ID: 58, Name: "count", Tag: "0011223344556677"}},
		{Interface: "eth1", Map: "/sys/fs/bpf/shunt/default/chain-eth1", Attached: 50,
			Shunt: &attach.Chained{ID: 61, Name: "sh_xdp", Tag: "fedcba9876543210"},
			Guest: &attach.Chained{ID: 62, Name: "sh_udp", Tag: "0f1e2d3c4b5a6978"}},
	}
	var text, json bytes.Buffer
	if err := printChains(&text, all); err != nil {
		t.Fatal(err)
	}
	golden.Require(t, "testdata/chain.golden", text.String())
	if err := cli.WriteJSON(&json, all); err != nil {
		t.Fatal(err)
	}
	golden.Require(t, "testdata/chain.json.golden", json.String())
}
