package resolve

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Questions returns the questions of the services: for each name the families that the service can use. With
// direct return backends of either family can serve.
func Questions(services []model.Service) []Question {
	var all []Question
	for _, s := range services {
		for _, name := range s.Names {
			for _, family := range []Family{IPv4, IPv6} {
				q := Question{name.DNS, family}
				if s.NamesServe(family == IPv4) && !slices.Contains(all, q) {
					all = append(all, q)
				}
			}
		}
	}
	return all
}

// Expand adds to services the backends that their names stand for, after their other backends: one backend for each
// address, with the weight of the name, or 0 if the address is leaving. It does not change its arguments. The
// conditions report unusable addresses, such as VIPs.
func Expand(services []model.Service, vips map[netip.Addr]bool, answer func(Question) Answer) (expanded []model.Service, unusable []condition.Condition) {
	expanded = slices.Clone(services)
	for i := range expanded {
		s := &expanded[i]
		if len(s.Names) == 0 {
			continue
		}
		s.Backends = slices.Clone(s.Backends)
		taken := map[model.BackendAddress]bool{}
		for _, b := range s.Backends {
			taken[s.Identity(b.BackendAddress)] = true
		}
		for _, name := range s.Names {
			found, fault := addressesOf(*s, name, answer, vips)
			if fault != "" {
				unusable = append(unusable, condition.Condition{Subject: s.Name + ", " + name.DNS, Text: fault})
			}
			for _, b := range found {
				if same := s.Identity(b.BackendAddress); !taken[same] {
					taken[same] = true
					s.Backends = append(s.Backends, b)
				}
			}
		}
	}
	return expanded, unusable
}

// addressesOf returns the backends of one name in a service, with the backends in use first. fault lists the
// unusable addresses.
func addressesOf(s model.Service, name model.BackendName, answer func(Question) Answer, vips map[netip.Addr]bool) (found []model.Backend, fault string) {
	var faults []string
	for _, q := range Questions([]model.Service{{Forwarding: s.Forwarding, Frontends: s.Frontends, Names: []model.BackendName{name}}}) {
		known := answer(q)
		add := func(a netip.Addr, weight uint16) {
			b := model.Backend{BackendAddress: model.BackendAddress{Address: a, Port: name.Port}, Weight: weight, Backup: name.Backup,
				CheckAt: model.BackendAddress{Port: name.CheckPort}, DNS: name.DNS}
			b.Name = b.BackendAddress.String()
			found = append(found, b)
		}
		used, left := 0, 0
		for _, a := range known.Addresses {
			switch why := unfit(a, vips); {
			case why != "":
				faults = append(faults, fmt.Sprintf("%s is %s", a, why))
			case used == int(name.Max):
				left++
			default:
				used++
				add(a, name.Weight)
			}
		}
		for _, a := range known.Leaving {
			if unfit(a, vips) == "" {
				add(a, 0)
			}
		}
		if left > 0 {
			faults = append(faults, fmt.Sprintf("%d addresses of %s are more than max: %d; the others take no flows", used+left, q, name.Max))
		}
	}
	return found, strings.Join(faults, "; ")
}

// unfit returns the reason why an address cannot be a backend's, or "".
func unfit(a netip.Addr, vips map[netip.Addr]bool) string {
	switch {
	case vips[a]:
		return "the address of a service"
	case a.IsUnspecified(), a.IsLoopback(), a.IsMulticast(), a.IsLinkLocalUnicast(), a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "no address of a server"
	}
	return ""
}
