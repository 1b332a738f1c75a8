package file

import (
	"net/netip"
	"regexp"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// domain is a name as the DNS is asked for it: letters, digits, hyphens and underscores (RFC 1035, 2.3.4 for the
// lengths; underscores are in use, though not in names of hosts).
var domain = regexp.MustCompile(`^([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?$`)

const domainMax = 254 // with the dot at its end

// backendName adds the backends that a name stands for. first has the position of each name of the service.
func (b *builder) backendName(item *backendEntry, s *model.Service, first map[model.BackendName]*config.Mark) {
	faults := b.parsed.faults
	for _, other := range []struct {
		mark *config.Mark
		name string
		why  string
	}{
		{&item.Address.Mark, "address", "a backend has an address or a name"},
		{&item.Name.Mark, "name", "dns stands for several backends, and each is called by its address"},
		{&item.Health.Address.Mark, "health.address", "dns stands for several backends, and each is checked at its own address"},
	} {
		if other.mark.Set {
			faults.Errorf(*other.mark, "remove it", "%s has no meaning with dns: %s", other.name, other.why)
		}
	}
	name := item.DNS.Value
	switch _, err := netip.ParseAddr(name); {
	case item.DNS.Bad:
		return
	case err == nil:
		faults.Errorf(item.DNS.Mark, "write address: "+name, "%q is an address, and no name to look up", name)
		return
	case len(name) > domainMax || !domain.MatchString(name):
		faults.Errorf(item.DNS.Mark, "write for example web.example.org", "%q is not a domain name", name)
		return
	}
	n := model.BackendName{DNS: strings.ToLower(name), Port: uint16(item.Port.Value), Weight: uint16(item.Weight.Value), Backup: item.Backup.Value,
		CheckPort: uint16(item.Health.Port.Value), Max: uint16(item.Max.Value)}
	same := model.BackendName{DNS: n.DNS, Port: s.Identity(model.BackendAddress{Port: n.Port}).Port}
	if earlier, double := first[same]; double {
		faults.Errorf(item.DNS.Mark, "remove one of them", "the name %s is listed twice, first at %s", n.DNS, earlier.At)
		return
	}
	first[same] = &item.DNS.Mark
	s.Names = append(s.Names, n)
	for _, is4 := range []bool{true, false} {
		if s.NamesServe(is4) {
			here := named{n.DNS, n.Port, is4}
			b.named[here] = max(b.named[here], uint64(n.Max))
		}
	}
}

// named is a name of a backend, for one family.
type named struct {
	dns  string
	port uint16
	is4  bool
}
