package resolve

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// answers returns the answers of a fixed zone.
func answers(q Question) Answer {
	of := func(texts ...string) (all []netip.Addr) {
		for _, t := range texts {
			all = append(all, netip.MustParseAddr(t))
		}
		return all
	}
	switch q {
	case Question{"web", IPv4}:
		return Answer{Addresses: of("10.0.0.2", "10.0.0.3", "10.0.0.4"), Leaving: of("10.0.0.9")}
	case Question{"web", IPv6}:
		return Answer{Addresses: of("2001:db8:1::2")}
	case Question{"odd", IPv4}:
		return Answer{Addresses: of("0.0.0.0", "127.0.0.1", "169.254.0.1", "192.0.2.10", "224.0.0.1", "255.255.255.255", "10.0.0.5"), Leaving: of("127.0.0.2")}
	}
	return Answer{}
}

func frontends(addresses ...string) (all []model.Frontend) {
	for _, a := range addresses {
		all = append(all, model.Frontend{Address: netip.MustParseAddr(a), Ports: value.PortRange{First: 80, Last: 80}, Protocol: model.TCP})
	}
	return all
}

// TestExpand: names become backends, of the families that a service can use. Addresses that the service has already,
// and addresses that no server can have, are left out.
func TestExpand(t *testing.T) {
	name := func(dns string, port, most uint16) model.BackendName {
		return model.BackendName{DNS: dns, Port: port, Weight: 3, CheckPort: 9, Max: most}
	}
	own := model.Backend{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.0.0.3"), Port: 80}, Name: "own", Weight: 1}
	for what, c := range map[string]struct {
		service   model.Service
		questions string
		want      string // address, weight
		faults    string
	}{
		"both families": {model.Service{Frontends: frontends("192.0.2.10", "2001:db8::10"), Names: []model.BackendName{name("web", 8080, 16)}},
			"web (A), web (AAAA)", "10.0.0.2:8080 3, 10.0.0.3:8080 3, 10.0.0.4:8080 3, 10.0.0.9:8080 0, [2001:db8:1::2]:8080 3", ""},
		"one": {model.Service{Frontends: frontends("192.0.2.10"), Names: []model.BackendName{name("web", 8080, 16)}},
			"web (A)", "10.0.0.2:8080 3, 10.0.0.3:8080 3, 10.0.0.4:8080 3, 10.0.0.9:8080 0", ""},
		"direct return": {model.Service{Frontends: frontends("2001:db8::10"), Forwarding: model.ForwardingDSRGUE, Names: []model.BackendName{name("web", 0, 1)}},
			"web (A), web (AAAA)", "10.0.0.2 3, 10.0.0.9 0, 2001:db8:1::2 3", "3 addresses of web (A) are more than max: 1; the others take no flows"},
		"with an address": {model.Service{Frontends: frontends("192.0.2.10"), Backends: []model.Backend{own}, Names: []model.BackendName{name("web", 80, 2), name("web", 81, 1)}},
			"web (A)", "10.0.0.3:80 1, 10.0.0.2:80 3, 10.0.0.9:80 0, 10.0.0.2:81 3, 10.0.0.9:81 0",
			"3 addresses of web (A) are more than max: 2; the others take no flows; 3 addresses of web (A) are more than max: 1; the others take no flows"},
		"odd": {model.Service{Frontends: frontends("192.0.2.10"), Names: []model.BackendName{name("odd", 80, 16)}},
			"odd (A)", "10.0.0.5:80 3", "0.0.0.0 is no address of a server; 127.0.0.1 is no address of a server; 169.254.0.1 is no address of a server; " +
				"192.0.2.10 is the address of a service; 224.0.0.1 is no address of a server; 255.255.255.255 is no address of a server"},
		"unknown":       {model.Service{Frontends: frontends("192.0.2.10"), Names: []model.BackendName{name("none", 80, 16)}}, "none (A)", "", ""},
		"without names": {model.Service{Frontends: frontends("192.0.2.10"), Backends: []model.Backend{own}}, "", "10.0.0.3:80 1", ""},
	} {
		var asked, got, faults []string
		for _, q := range Questions([]model.Service{c.service, c.service}) {
			asked = append(asked, q.String())
		}
		before := len(c.service.Backends)
		expanded, unusable := Expand([]model.Service{c.service}, vipsOf(c.service), answers)
		for i, b := range expanded[0].Backends {
			got = append(got, fmt.Sprint(b.BackendAddress, " ", b.Weight))
			if named := i >= before; named && (b.DNS == "" || b.CheckAt.Port != 9 || b.Name != b.BackendAddress.String()) {
				t.Errorf("%s: backend %+v", what, b)
			}
		}
		for _, u := range unusable {
			faults = append(faults, u.Text)
		}
		if strings.Join(asked, ", ") != c.questions || strings.Join(got, ", ") != c.want || strings.Join(faults, "; ") != c.faults {
			t.Errorf("%s:\n%q\n%q\n%q\nwant\n%q\n%q\n%q", what, asked, got, faults, c.questions, c.want, c.faults)
		}
		if len(c.service.Backends) != before {
			t.Errorf("%s: the declaration has changed", what)
		}
	}
}

func vipsOf(s model.Service) map[netip.Addr]bool {
	vips := map[netip.Addr]bool{}
	for _, f := range s.Frontends {
		vips[f.Address] = true
	}
	return vips
}
