package daemon

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/vishvananda/netlink"
)

// allInterfaces is the word for every veth.
const allInterfaces = "all"

// settings are the settings of accelerate in the file.
type settings struct {
	interfaces []string // names and patterns, or all alone
	mode       shortcut.Mode
	sameNode   bool
	uplinks    []string // names
	steers     []watch.Steer
	sockets    socketSettings
}

// parsed are the settings of files, with their positions. Positions keep the files' text in memory, so they are not
// part of the settings.
type parsed struct {
	settings
	faults *config.Faults
	marks  []config.Mark // of interfaces
	above  []config.Mark // of uplinks
	// steered are the marks of steers' interfaces.
	steered []config.Mark
	grouped []config.Mark // of cgroups
	whole   config.Mark
}

// isPattern reports whether an entry of interfaces can match several.
func isPattern(s string) bool { return s == allInterfaces || strings.ContainsAny(s, "*?") }

// build makes the settings, and checks their meaning.
func build(d *document, read *config.Contents) any {
	p := &parsed{faults: &read.Faults, whole: d.Mark, settings: settings{mode: shortcut.Mode(d.Mode.Value), sameNode: d.SameNode.Value}}
	var claims []config.Claim
	for _, e := range d.Interfaces.Items {
		name := e.Value
		switch {
		case e.Bad:
			continue
		case name == allInterfaces && len(d.Interfaces.Items) > 1:
			p.faults.Errorf(e.Mark, "write interfaces: all, or a list without all", "interfaces are all, or names and patterns")
		case strings.ContainsAny(name, "/:[]\\") || name == "." || name == "..":
			p.faults.Errorf(e.Mark, "in a pattern, * stands for any characters and ? for one", "%q cannot be an interface's name or a pattern", name)
			continue
		case slices.Contains(p.interfaces, name):
			p.faults.Errorf(e.Mark, "remove one of them", "interface %s is in the list twice", name)
			continue
		}
		p.interfaces, p.marks = append(p.interfaces, name), append(p.marks, e.Mark)
		if !isPattern(name) {
			for _, of := range []string{"interface ", "udp interface "} {
				claims = append(claims, config.Claim{Of: of + name, Text: "interface " + name, As: "one of accelerate's", Mark: e.Mark,
					Why: "a pod's veth can belong only to the pod shortcut", Instead: "remove it from one of them"})
			}
		}
	}
	read.Claims(slices.Values(claims))
	p.buildUplinks(d)
	p.buildSteers(d)
	p.buildSockets(d)
	return p
}

// buildUplinks reads the uplinks. The balancer and the UDP path may use an uplink as well: their programs run at XDP,
// before those at tc, and the watch looks at the programs at tc.
func (p *parsed) buildUplinks(d *document) {
	for _, e := range d.Uplinks.Items {
		name := e.Value
		switch {
		case e.Bad:
			continue
		case isPattern(name) || strings.ContainsAny(name, "/:[]\\") || name == "." || name == "..":
			p.faults.Errorf(e.Mark, "name each uplink, as `ip route` shows it behind dev", "%q cannot be an interface's name", name)
			continue
		case slices.Contains(p.uplinks, name):
			p.faults.Errorf(e.Mark, "remove one of them", "interface %s is in the list twice", name)
			continue
		case slices.Contains(p.interfaces, name):
			p.faults.Errorf(e.Mark, "remove it from one of them", "interface %s is among accelerate's interfaces, too: it leads to a pod or to other hosts", name)
			continue
		case !p.sameNode:
			p.faults.Errorf(e.Mark, "leave same_node out, or uplinks", "same_node: false switches the whole pod shortcut off, also uplinks")
			continue
		}
		p.uplinks, p.above = append(p.uplinks, name), append(p.above, e.Mark)
	}
}

// find returns a function that finds the pods of the settings.
func (s *settings) find() func() ([]watch.Pod, error) {
	var names []string
	for _, e := range s.interfaces {
		if !isPattern(e) {
			names = append(names, e)
		}
	}
	patterns, uplinks := slices.Clone(s.interfaces), slices.Clone(s.uplinks)
	return watch.Routed(func(name string) bool {
		return !slices.Contains(uplinks, name) && slices.ContainsFunc(patterns, func(pattern string) bool {
			matched, err := path.Match(pattern, name)
			return pattern == allInterfaces || err == nil && matched
		})
	}, names...)
}

// checkHost reports names that are no veth on this machine, and missing conntrack.
func (p *parsed) checkHost(how node.HostCheck) {
	severity := config.SeverityWarning
	if how.Strict {
		severity = config.SeverityError
	}
	for i, name := range p.interfaces {
		if isPattern(name) {
			continue
		}
		link, err := netlink.LinkByName(name)
		switch {
		case err != nil:
			p.faults.Add(severity, p.marks[i], fmt.Sprintf("shunt cannot use this machine's interface %s: %v", name, err), "`ip link` lists the interfaces; shunt uses a pod's veth as soon as it exists")
		case link.Type() != "veth":
			p.faults.Add(severity, p.marks[i], fmt.Sprintf("this machine's interface %s is of kind %s, but a pod is behind a veth", name, link.Type()), "name the host's end of a pod's veth, as in `ip -details link show type veth`")
		}
	}
	for i, name := range p.uplinks {
		link, err := netlink.LinkByName(name)
		switch {
		case err != nil:
			p.faults.Add(severity, p.above[i], fmt.Sprintf("shunt cannot use this machine's interface %s: %v", name, err), "`ip link` lists the interfaces; shunt uses an uplink as soon as it exists")
		case link.Attrs().EncapType != "ether":
			p.faults.Add(severity, p.above[i], fmt.Sprintf("this machine's interface %s is no Ethernet interface", name), "name the interface that `ip route` shows behind dev for networks of other hosts' pods; a tunnel of IP in IP cannot be one")
		}
	}
	p.checkSteers(severity)
	p.checkSockets(severity)
	if _, err := host.ReadNumber("net/netfilter/nf_conntrack_tcp_timeout_established"); err != nil && p.sameNode {
		p.faults.Add(severity, p.whole, "this machine's kernel has no conntrack, which the pod shortcut needs for each packet", "load it with `modprobe nf_conntrack`")
	}
}

// list returns all settings with their values.
func (s *settings) list() []value.Setting {
	return append([]value.Setting{
		{Key: "accelerate interfaces", Value: strings.Join(s.interfaces, ", ")},
		{Key: "accelerate mode", Value: string(s.mode)},
		{Key: "accelerate same_node", Value: strconv.FormatBool(s.sameNode)},
		{Key: "accelerate uplinks", Value: cmp.Or(strings.Join(s.uplinks, ", "), "none")},
	}, append(s.steerSettings(), s.sockets.settings()...)...)
}

// describe summarises settings without faults, for `shunt check`.
func (s *settings) describe() (counts string, lines []string) {
	if !s.sameNode {
		return "no pod shortcut", nil
	}
	counts = fmt.Sprintf("the pod shortcut on %s, %s", strings.Join(s.interfaces, ", "), s.mode)
	if len(s.uplinks) > 0 {
		counts += ", to other hosts by " + strings.Join(s.uplinks, ", ")
	}
	if len(s.sockets.cgroups) > 0 {
		lines = append(lines, fmt.Sprintf("sockets of %s are paired, ports %s, if this kernel can", strings.Join(s.sockets.cgroups, ", "), s.sockets.portsText()))
	}
	for _, one := range s.steers {
		lines = append(lines, fmt.Sprintf("steer %s: %s", one.Name, steerText(&one)))
	}
	return counts, lines
}
