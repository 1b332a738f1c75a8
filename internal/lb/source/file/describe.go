package file

import (
	"fmt"

	"github.com/shunt-lb/shunt/internal/value"
)

// Describe sums up a configuration without errors: counts, and lines with its memory and with the services that
// are not checked.
func (p *Parsed) Describe() (counts string, lines []string) {
	frontends, backends, names := 0, 0, 0
	for _, service := range p.Config.Services {
		frontends += len(service.Frontends)
		backends += len(service.Backends)
		names += len(service.Names)
	}
	servers := value.Counted(backends, "backend")
	if names > 0 {
		servers += " and " + value.Counted(names, "name") + " to look up"
	}
	counts = fmt.Sprintf("%s, %s, %s", value.Counted(len(p.Config.Services), "service"), value.Counted(frontends, "frontend"), servers)
	total, each := Memory(p.Config.Limits)
	lines = append(lines, fmt.Sprintf("Its limits take up to %.0f MiB of kernel memory:", mebibytes(total)))
	for _, line := range each {
		lines = append(lines, "  "+line)
	}
	if names := p.Unchecked(); len(names) > 0 {
		lines = append(lines, fmt.Sprintf("Backends of %s count as up, because nothing checks them: `health` configures checks.", value.Few(names)))
	}
	return counts, lines
}
