package realserver

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Want lists the services that a server has to be fit for.
type Want struct {
	Interface string // where the balancer's packets arrive
	VIPs      []netip.Addr
	// Forwarding is the forwarding of the services. Empty: unknown, so encapsulation is examined only if this
	// machine decapsulates: IPIP, and GUE if GUEPort is not 0.
	Forwarding model.Forwarding
	GUEPort    uint16
	// Senders are the balancers, as far as they are known. Their family is the outer header's.
	Senders []netip.Prefix
}

// examination collects findings.
type examination struct {
	Facts
	Want
	set condition.Set
}

// Examine returns the faults, worst first. Without faults of the severities warning and error direct return
// works, as far as the server is concerned. It only reads its arguments.
func Examine(f Facts, w Want) []condition.Condition {
	e := &examination{Facts: f, Want: w}
	link, there := f.link(w.Interface)
	if !there {
		e.raise(condition.InterfaceMissing, w.Interface, "ip link show", "interface %s does not exist", w.Interface)
		return e.set.All()
	}
	if !link.Up {
		e.raise(InterfaceDown, link.Name, "ip link set dev "+link.Name+" up", "interface %s is down", link.Name)
	}
	for _, vip := range w.VIPs {
		e.examineAddress(vip)
		if e.encapsulates() {
			e.examineTunnel(vip, link)
		}
	}
	if slices.ContainsFunc(w.VIPs, netip.Addr.Is4) {
		e.examineARP(link)
		e.examineReversePath(link)
	}
	e.examineRoutes()
	return e.set.All()
}

// Wrong reports whether findings prevent direct return.
func Wrong(findings []condition.Condition) bool {
	return slices.ContainsFunc(findings, func(c condition.Condition) bool { return c.Severity != condition.Info })
}

func (e *examination) raise(code, subject, remedy, text string, values ...any) {
	d, _ := Lookup(code)
	e.set.Raise(condition.Condition{Code: code, Severity: d.Severity, Subject: subject, Remedy: remedy, Text: fmt.Sprintf(text, values...)})
}

// encapsulates reports whether packets arrive encapsulated, as far as known.
func (e *examination) encapsulates() bool {
	if e.Forwarding != "" {
		return e.Forwarding.Encapsulates()
	}
	return e.decapHere() || slices.ContainsFunc(e.Links, func(l Link) bool { return l.Tunnel.Outer != 0 })
}

func (e *examination) decapHere() bool { return slices.Contains(e.Decap, e.Interface) }

// prefix returns the address with all its bits, as `ip` takes it.
func prefix(a netip.Addr) string { return netip.PrefixFrom(a, a.BitLen()).String() }

func addCommand(vip netip.Addr) string {
	if vip.Is4() {
		return "ip address add " + prefix(vip) + " dev lo scope host"
	}
	return "ip address add " + prefix(vip) + " dev lo preferred_lft 0"
}

func (e *examination) examineAddress(vip netip.Addr) {
	found := false
	for _, l := range e.Links {
		if !slices.Contains(l.Addresses, vip) {
			continue
		}
		if l.NoARP {
			found = true
			continue
		}
		e.raise(VIPVisible, vip.String(), fmt.Sprintf("%s; ip address del %s dev %s", addCommand(vip), prefix(vip), l.Name),
			"%s is on %s, where this machine tells the network that it has this address", vip, l.Name)
		found = true
	}
	if !found {
		e.raise(VIPMissing, vip.String(), addCommand(vip), "no interface of this machine has %s", vip)
	}
}

func setCommand(device, name string, value int) string {
	if strings.Contains(device, ".") { // sysctl(8) takes slashes where a name has dots
		return fmt.Sprintf("sysctl -w net/ipv4/conf/%s/%s=%d", device, name, value)
	}
	return fmt.Sprintf("sysctl -w net.ipv4.conf.%s.%s=%d", device, name, value)
}

func (e *examination) examineARP(link Link) {
	if link.NoARP {
		return
	}
	all, own := e.Settings["all"], e.Settings[link.Name]
	if value := max(all.ARPIgnore, own.ARPIgnore); value < arpIgnoreLeast {
		e.raise(ARPAnswered, link.Name, setCommand("all", "arp_ignore", arpIgnoreLeast),
			"arp_ignore of %s is %d: it answers ARP for VIPs on lo", link.Name, value)
	}
	if value := max(all.ARPAnnounce, own.ARPAnnounce); value < arpAnnounceLeast {
		e.raise(ARPAnnounced, link.Name, setCommand("all", "arp_announce", arpAnnounceLeast),
			"arp_announce of %s is %d: it may ask for its neighbours with a VIP as the sender", link.Name, value)
	}
}

// examineReversePath examines the interface on which packets appear: the interface itself, or a tunnel device.
func (e *examination) examineReversePath(link Link) {
	out := []string{link.Name}
	if e.encapsulates() && !e.decapHere() {
		out = nil
		for _, l := range e.Links {
			if l.Tunnel.Inner4 {
				out = append(out, l.Name)
			}
		}
	}
	for _, device := range out {
		if max(e.Settings["all"].RPFilter, e.Settings[device].RPFilter) != reversePathStrict {
			continue
		}
		c := condition.Condition{Code: ReversePathStrict, Severity: condition.Error, Subject: device,
			Text:   fmt.Sprintf("rp_filter of %s is strict, and the default route uses another interface: packets of clients are dropped", device),
			Remedy: setCommand(device, "rp_filter", reversePathLoose)}
		if slices.ContainsFunc(e.Defaults, func(r Route) bool { return r.Family == 4 && r.Interface == device }) {
			c.Severity = condition.Info
			c.Text = fmt.Sprintf("rp_filter of %s is strict: packets of clients that are reached through another interface are dropped", device)
		}
		e.set.Raise(c)
	}
}

func number(a netip.Addr) int {
	if a.Is4() {
		return 4
	}
	return 6
}

// outerFamily returns the family of the outer header: the balancers' family, if all have the same one.
// Otherwise the one that they are likely to use, which is that of the backend's address: the VIP's family if
// the interface has such an address.
func (e *examination) outerFamily(vip netip.Addr, link Link) int {
	four, six := false, false
	for _, p := range e.Senders {
		four = four || p.Addr().Is4()
		six = six || p.Addr().Is6()
	}
	if four != six {
		if four {
			return 4
		}
		return 6
	}
	for _, a := range link.Addresses {
		four = four || a.Is4()
		six = six || a.Is6() && !a.IsLinkLocalUnicast()
	}
	if vip.Is4() && four || !six {
		return 4
	}
	if vip.Is6() && six || !four {
		return 6
	}
	return number(vip)
}

// Header sizes in bytes: RFC 791, RFC 8200, RFC 9293, RFC 768, and 4 of GUE.
const (
	headerIPv4, headerIPv6, headerTCP, headerGUE = 20, 40, 20, 8 + 4
	// internetMTU is the longest packet that clients send: Ethernet's (RFC 894).
	internetMTU = 1500
)

func headerOf(family int) int {
	if family == 4 {
		return headerIPv4
	}
	return headerIPv6
}

func (e *examination) examineTunnel(vip netip.Addr, link Link) {
	outer := e.outerFamily(vip, link)
	if !e.decapHere() {
		e.examineDevices(vip, outer)
	}
	e.examineMTU(vip, link, outer)
}

// examineMTU checks whether the longest packets of clients fit after encapsulation.
func (e *examination) examineMTU(vip netip.Addr, link Link, outer int) {
	route := Route{Interface: link.Name}
	for _, r := range e.Defaults {
		if r.Family == number(vip) {
			route = r
			break
		}
	}
	headers := headerOf(number(vip)) + headerTCP
	out, known := e.link(route.Interface)
	if !known {
		out = link
	}
	// The server's own SYN tells clients how long their segments may be.
	mss := cmp.Or(route.MSS, cmp.Or(route.MTU, out.MTU)-headers)
	longest := min(internetMTU, mss+headers)
	var become, fits []string
	least, most := 0, 0
	severity := condition.Warning
	for _, f := range e.forwardings() {
		overhead := headerOf(outer)
		if f == model.ForwardingDSRGUE {
			overhead += headerGUE
		}
		if longest+overhead <= link.MTU {
			severity = condition.Info // so only the other possible encapsulation does not fit
			continue
		}
		least, most = link.MTU-overhead-headers, internetMTU+overhead
		become = append(become, fmt.Sprintf("%d with %s", longest+overhead, f))
		fits = append(fits, fmt.Sprint(least))
	}
	if len(become) == 0 {
		return
	}
	remedy := fmt.Sprintf("raise the MTU of %s, of the balancer, and of all between them to %d", link.Name, most)
	if route.Family != 0 {
		remedy = routeCommand(route, least) + "; or " + remedy
	}
	e.set.Raise(condition.Condition{Code: TunnelMTU, Severity: severity, Subject: vip.String(), Remedy: remedy,
		Text: fmt.Sprintf("packets of %d bytes to %s become %s in the tunnel, and the MTU of %s is %d: the MSS of clients must be at most %s",
			longest, vip, strings.Join(become, " and "), link.Name, link.MTU, strings.Join(fits, " and "))})
}

// forwardings returns the encapsulations that may arrive, the shorter one first.
func (e *examination) forwardings() []model.Forwarding {
	switch {
	case e.Forwarding != "":
		return []model.Forwarding{e.Forwarding}
	case e.GUEPort != 0 && (e.decapHere() || slices.Contains(e.GUE, e.GUEPort)):
		return []model.Forwarding{model.ForwardingDSRIPIP, model.ForwardingDSRGUE}
	}
	return []model.Forwarding{model.ForwardingDSRIPIP}
}

func routeCommand(r Route, mss int) string {
	text := "ip route change default"
	if r.Family == 6 {
		text = "ip -6 route change default"
	}
	if r.Gateway.IsValid() {
		text += " via " + r.Gateway.String()
	}
	text += " dev " + r.Interface
	if r.Priority != 0 {
		text += fmt.Sprintf(" metric %d", r.Priority)
	}
	return fmt.Sprintf("%s advmss %d", text, mss)
}

// examineDevices looks for a tunnel device of the kernel that accepts this VIP's packets.
func (e *examination) examineDevices(vip netip.Addr, outer int) {
	shunt := fmt.Sprintf("shunt decap --interface %s --vip %s --from BALANCER", e.Interface, vip)
	if e.Forwarding == model.ForwardingDSRGUE {
		if e.GUEPort != 0 {
			shunt += fmt.Sprintf(" --gue-port %d", e.GUEPort)
		}
		if !slices.Contains(e.GUE, e.GUEPort) {
			e.raise(TunnelMissing, vip.String(), shunt,
				"nothing decapsulates GUE on UDP port %d for %s: sh_decap is not on %s, and the kernel has no such port (`ip fou show`)", e.GUEPort, vip, e.Interface)
			return
		}
	}
	down := ""
	for _, l := range e.Links {
		t := l.Tunnel
		if t.Outer != outer || vip.Is4() && !t.Inner4 || vip.Is6() && !t.Inner6 {
			continue
		}
		if l.Up {
			return
		}
		down = l.Name
	}
	if down != "" {
		e.raise(TunnelDown, down, "ip link set dev "+down+" up", "%s decapsulates IPv%d from IPv%d, but it is down", down, number(vip), outer)
		return
	}
	e.raise(TunnelMissing, vip.String(), shunt,
		"nothing decapsulates IPv%d from IPv%d for %s: sh_decap is not on %s, and there is no tunnel device for it", number(vip), outer, vip, e.Interface)
}

func (e *examination) examineRoutes() {
	for _, family := range []int{4, 6} {
		needed := slices.ContainsFunc(e.VIPs, func(a netip.Addr) bool { return number(a) == family })
		if !needed || slices.ContainsFunc(e.Defaults, func(r Route) bool { return r.Family == family }) {
			continue
		}
		command := "ip route add default via GATEWAY dev " + e.Interface
		if family == 6 {
			command = "ip -6 route add default via GATEWAY dev " + e.Interface
		}
		e.raise(NoDefaultRoute, fmt.Sprintf("IPv%d", family), command, "there is no default route for IPv%d: answers reach only clients that another route leads to", family)
	}
}
