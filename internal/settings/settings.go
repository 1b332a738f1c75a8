// Package settings has the keys of the configuration file that belong to no product: the sockets of the daemon, and the
// address of its metrics.
package settings

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/value"
)

const name = "node"

// Settings are the values of the keys.
type Settings struct {
	API     API
	Metrics Metrics
}

// parsed are the settings of files, with their positions in the file. A position keeps the file's text in memory, so positions are
// not among the settings.
type parsed struct {
	Settings
	groups []config.Mark // of API.Group and ReadGroup
	listen config.Mark   // of Metrics.Listen
}

// API is the daemon's sockets.
type API struct {
	Socket    string // path
	Group     string // may use the socket, besides root; empty: nobody
	ReadGroup string // may use the socket for reading; empty: nobody
}

// Metrics has the address at which Prometheus is answered.
type Metrics struct {
	Listen    netip.AddrPort // zero: nowhere
	SeriesMax uint32         // of services and backends
}

// document is the keys at the top of the file.
type document struct {
	config.Mark `json:"-"`
	API         apiEntry     `json:"api,omitempty" doc:"The sockets of the daemon, and which groups may use them besides root." example:"{group: shunt-admin, read_group: shunt}"`
	Metrics     metricsEntry `json:"metrics,omitempty" doc:"Metrics for Prometheus, over HTTP." example:"{listen: \"127.0.0.1:9470\"}"`
}

// Part is the package's part of a file. It has settings for every file.
var Part = config.NewTop(name, build).Always()

// Of returns a configuration's settings; ok is false if it has none at all.
func Of(c *config.Contents) (s Settings, ok bool) {
	p, ok := c.Settings[name].(parsed)
	return p.Settings, ok
}

func build(d *document, _ *config.Contents) any {
	s := Settings{
		API:     API{Socket: d.API.Socket.Value, Group: d.API.Group.Value, ReadGroup: d.API.ReadGroup.Value},
		Metrics: Metrics{Listen: d.Metrics.Listen.Value, SeriesMax: uint32(d.Metrics.MaxSeries.Value)},
	}
	return parsed{s, []config.Mark{d.API.Group.Mark, d.API.ReadGroup.Mark}, d.Metrics.Listen.Mark}
}

// Host answers for a machine.
type Host struct {
	HasGroup  func(name string) bool      // whether there is a group of users
	CanListen func(addr netip.Addr) error // why a socket cannot have an address; nil: it can
}

// CheckHost adds to the faults of a configuration the groups that a machine lacks, and an address for metrics that it
// cannot have.
func CheckHost(c *config.Contents, severity config.Severity, host Host) {
	p, ok := c.Settings[name].(parsed)
	if !ok {
		return
	}
	for i, name := range []string{p.API.Group, p.API.ReadGroup} {
		if name != "" && !host.HasGroup(name) {
			c.Faults.Add(severity, p.groups[i], fmt.Sprintf("this machine has no group %q, and the daemon does not start without it", name),
				"create it with `groupadd --system "+name+"`")
		}
	}
	if listen := p.Metrics.Listen; listen.IsValid() {
		if err := host.CanListen(listen.Addr()); err != nil {
			c.Faults.Add(severity, p.listen, fmt.Sprintf("no process can listen at %s on this machine: %v", listen.Addr(), err),
				"`ip address` lists the machine's addresses; 0.0.0.0 and [::] mean all addresses")
		}
	}
}

// List is all settings with their values. A key that is not set has the value that counts then.
func (s Settings) List() []value.Setting {
	const nobody = "root only"
	listen := "nowhere"
	if s.Metrics.Listen.IsValid() {
		listen = s.Metrics.Listen.String()
	}
	return []value.Setting{
		{Key: "api.socket", Value: s.API.Socket},
		{Key: "api.group", Value: cmp.Or(s.API.Group, nobody)},
		{Key: "api.read_group", Value: cmp.Or(s.API.ReadGroup, nobody)},
		{Key: "metrics.listen", Value: listen},
		{Key: "metrics.max_series", Value: strconv.FormatUint(uint64(s.Metrics.SeriesMax), 10)},
	}
}

// apiEntry is api.
type apiEntry struct {
	config.Mark `json:"-"`
	Socket      config.Text `json:"socket,omitempty" doc:"The path of the control socket, for root and the group. Beside it is a second socket that only shows the state: shunt-read.sock for shunt.sock. --socket and SHUNT_SOCKET take precedence." min:"1" max:"102" default:"/run/shunt/shunt.sock" example:"/run/shunt/shunt.sock"`
	Group       config.Text `json:"group,omitempty" doc:"Members of this group of the machine may use the control socket: reload, drain, override, and read. Without it: only root may." min:"1" max:"63" example:"shunt-admin"`
	ReadGroup   config.Text `json:"read_group,omitempty" doc:"Members of this group may use the socket for reading. Without it: only root may." min:"1" max:"63" example:"shunt"`
}

// metricsEntry is metrics.
type metricsEntry struct {
	config.Mark `json:"-"`
	Listen      config.Listen `json:"listen" doc:"The address and port at which shunt answers GET /metrics. Every host that reaches it may read all names, addresses and counters: there is no password and no TLS. 0.0.0.0 is every IPv4 address of this machine, and [::] every address." example:"127.0.0.1:9470"`
	MaxSeries   config.Number `json:"max_series,omitempty" unit:"series" doc:"How many time series of services and backends an answer may have. A service has 12, a backend 6, and a backend of a service 4. Services that do not fit are left out, the last of the file first, and shunt_metrics_services_left_out counts them. 100,000 series are about 10 MB." min:"1000" max:"10000000" default:"200000" example:"50000"`
}
