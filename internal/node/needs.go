package node

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/settings"
)

// Need is an action of a product that a service manager's sandbox refuses unless its unit permits it.
type Need struct {
	Setting string // of the unit: one of NeedCapability and so on
	Value   string // one value of the setting
	For     string // the product's use of it, in a few words
}

// The settings of a unit that a need can name (systemd.exec(5)).
const (
	NeedCapability = "CapabilityBoundingSet"
	NeedFamily     = "RestrictAddressFamilies"
	NeedPath       = "ReadWritePaths"        // "-" before the path: only if the path exists
	NeedTunables   = "ProtectKernelTunables" // the value is "no"
	NeedMemory     = "LimitMEMLOCK"
	NeedCall       = "SystemCallFilter"
)

// needSettings lists all settings, in the order of a drop-in. A list of a unit is cleared first. The other
// settings are written only to permit more: systemd accepts no empty value for them, and calls are added to
// the calls that the unit always permits.
var needSettings = []struct {
	name     string
	withdraw bool
}{
	{NeedCapability, true}, {NeedFamily, true}, {NeedPath, true}, {NeedTunables, false}, {NeedMemory, false}, {NeedCall, false},
}

// ownNeeds are the needs of the node itself, with any products.
var ownNeeds = []Need{
	{NeedCapability, "CAP_CHOWN", "gives the sockets of the API to the groups that the configuration names"},
	{NeedFamily, "AF_UNIX", "the sockets of the API, the journal, systemd"},
	{NeedFamily, "AF_NETLINK", "interfaces, addresses"},
	{NeedFamily, "AF_INET", "metrics, names in the DNS"},
	{NeedFamily, "AF_INET6", "metrics, names in the DNS"},
	{NeedPath, "-/sys/fs/bpf/shunt", "pinned maps and links"},
	{NeedCall, "@chown", "the sockets of the API"},
}

// DefaultNeeds are the needs that the package's unit permits: the needs of every product unless its settings ask for
// something special.
func DefaultNeeds(products []Product) []Need {
	needs := slices.Clone(ownNeeds)
	for _, p := range products {
		needs = append(needs, p.needs(nil)...)
	}
	return needs
}

// NeedsOf are the needs of a file without faults.
func NeedsOf(products []Product, c *config.Contents) []Need {
	needs := slices.Clone(ownNeeds)
	if s, said := settings.Of(c); said {
		needs = append(needs, NeedSocket(s.API.Socket)...)
	}
	for _, p := range products {
		if said, named := c.Settings[p.Name]; named {
			needs = append(needs, p.needs(said)...)
		}
	}
	return needs
}

// NeedSocket returns the need of a socket at a path: none in RunDirectory.
func NeedSocket(path string) []Need {
	folder := filepath.Dir(path)
	if folder == RunDirectory || strings.HasPrefix(folder, RunDirectory+"/") {
		return nil
	}
	return []Need{{NeedPath, "-" + folder, "the socket " + strconv.Quote(path)}}
}

func (p *Product) needs(settings any) []Need {
	if p.Needs == nil {
		return nil
	}
	return p.Needs(settings)
}

// NeedValues returns the values of one setting, each once, sorted.
func NeedValues(needs []Need, setting string) (values []string) {
	for _, n := range needs {
		if n.Setting == setting {
			values = append(values, n.Value)
		}
	}
	slices.Sort(values)
	return slices.Compact(values)
}

// WriteDropIn writes the part of a systemd unit that permits these needs. In each setting that a need can name, the
// unit then permits nothing else. A comment gives the reason for each need.
func WriteDropIn(w io.Writer, needs []Need) error {
	var b strings.Builder
	b.WriteString("[Service]\n")
	for _, s := range needSettings {
		if s.withdraw {
			fmt.Fprintf(&b, "%s=\n", s.name)
		}
		for _, value := range NeedValues(needs, s.name) {
			var uses []string
			for _, n := range needs {
				if n.Setting == s.name && n.Value == value && !slices.Contains(uses, n.For) {
					uses = append(uses, n.For)
				}
			}
			fmt.Fprintf(&b, "# %s\n%s=%s\n", strings.Join(uses, "; "), s.name, unitValue(value))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// unitValue returns one value of a list in the form of a unit: systemd splits at blanks, and % begins a
// specifier.
func unitValue(value string) string {
	value = strings.ReplaceAll(value, "%", "%%")
	if strings.ContainsAny(value, " \t\n\"'\\") {
		return strconv.Quote(value)
	}
	return value
}
