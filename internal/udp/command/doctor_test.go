package command

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/udp/doctor"
)

// A fault is an exit code of 1, advice is not; both have their command, in text and in JSON.
func TestUDPDoctorTells(t *testing.T) {
	facts := doctor.Facts{Interface: "eth0", Unknown: []string{"the hash of udp4: no answer"}}
	fault, advice := doctor.Finding{Code: "mtu", Fault: true, Text: "large", Why: "frames", Remedy: "ip link"}, doctor.Finding{Code: "copy", Text: "slow", Why: "copies", Remedy: "mode: copy"}
	for _, c := range []struct {
		findings []doctor.Finding
		silent   bool
		text     string
	}{
		{[]doctor.Finding{fault, advice}, true, "fault: large\n  why   frames\n  fix   ip link\n\nadvice: slow\n  why   copies\n  fix   mode: copy\n\nNot known: the hash of udp4: no answer.\n1 fault and 1 other finding on eth0.\n"},
		{[]doctor.Finding{advice}, false, "0 faults and 1 other finding on eth0.\n"},
		{[]doctor.Finding{}, false, "0 faults and 0 other findings on eth0.\n"},
	} {
		var out bytes.Buffer
		if err := tellUDPFindings(&out, facts, c.findings, ""); errors.Is(err, cli.ErrSilent) != c.silent || !c.silent && err != nil || !strings.HasSuffix(out.String(), c.text) {
			t.Errorf("%v:\n%s\nwant\n%s", err, out.String(), c.text)
		}
		out.Reset()
		var read struct {
			OK       bool
			Findings []doctor.Finding
			Unknown  []string
		}
		if err := tellUDPFindings(&out, facts, c.findings, "json"); errors.Is(err, cli.ErrSilent) != c.silent {
			t.Error(err)
		}
		if err := json.Unmarshal(out.Bytes(), &read); err != nil || read.OK == c.silent || len(read.Findings) != len(c.findings) || len(read.Unknown) != 1 {
			t.Errorf("%v: %s", err, out.String())
		}
	}
}

// The leases of the interface are compared; leases that cannot be compared are listed.
func TestUDPDoctorKnowsWorkers(t *testing.T) {
	facts := doctor.Facts{Interface: "eth0"}
	leases := append(sampleLeases(), &shuntv1.UDPLease{Name: "anywhere", Interface: "eth0", Holder: &shuntv1.UDPHolder{Queues: []*shuntv1.UDPQueue{{Queue: 1}}}})
	addWorkers(&facts, leases)
	if want := []doctor.Worker{{Lease: "feed", Queue: 0, CPU: 2, Pinned: true, BusyPoll: true}, {Lease: "feed", Queue: 3, CPU: 3, BusyPoll: true}}; !slices.Equal(facts.Workers, want) {
		t.Errorf("%+v", facts.Workers)
	}
	if want := []string{"the CPUs of the lease idle: no program has it", "the CPUs of the lease shut: no program has it", "the CPUs of the lease anywhere: its entry has no cpu"}; !slices.Equal(facts.Unknown, want) {
		t.Errorf("%q", facts.Unknown)
	}
}
