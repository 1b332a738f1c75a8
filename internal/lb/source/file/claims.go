package file

import (
	"fmt"
	"iter"

	"github.com/shunt-lb/shunt/internal/config"
)

// claims are the balancer's exclusive claims: its interfaces, and the packets to its frontends.
func (b *builder) claims() iter.Seq[config.Claim] {
	return func(yield func(config.Claim) bool) {
		for i, entry := range b.parsed.Config.Interfaces {
			if !yield(config.Claim{Of: "interface " + entry.Name, As: "one of the balancer's interfaces", Mark: b.parsed.interfaces[i]}) {
				return
			}
		}
		for _, f := range b.frontends {
			of := fmt.Sprintf("%s %s", f.Protocol, f.Address)
			if !yield(config.Claim{Of: of, Ports: f.Ports, As: fmt.Sprintf("a frontend of service %q", f.service.Name.Value), Mark: f.port}) {
				return
			}
		}
	}
}
