package realserver

import "github.com/shunt-lb/shunt/internal/condition"

// The codes of faults at a backend. A code is never renamed and never reused.
const (
	ARPAnnounced      = "vip_arp_announced"
	ARPAnswered       = "vip_arp_answered"
	InterfaceDown     = "interface_down"
	NoDefaultRoute    = "default_route_missing"
	ReversePathStrict = "reverse_path_strict"
	TunnelDown        = "tunnel_down"
	TunnelMissing     = "tunnel_missing"
	TunnelMTU         = "tunnel_mtu"
	VIPMissing        = "vip_missing"
	VIPVisible        = "vip_visible"
)

// Codes describes each code, sorted. The remedy in a condition is a command, and more exact than the remedy
// here.
var Codes = []condition.Definition{
	{
		Code: NoDefaultRoute, Severity: condition.Error, Subject: "address family",
		Meaning: "Answers go straight to the clients, so the server needs a route to them.",
		Remedy:  "add a default route",
	},
	{
		Code: InterfaceDown, Severity: condition.Error, Subject: "interface",
		Meaning: "No packet arrives through an interface that is down.",
		Remedy:  "set the interface up",
	},
	{
		Code: ReversePathStrict, Severity: condition.Error, Subject: "interface",
		Meaning: "With strict reverse path filtering the kernel drops packets of clients that it would answer through another interface.",
		Remedy:  "set rp_filter to 2, which still drops sources that no route leads to",
	},
	{
		Code: TunnelDown, Severity: condition.Error, Subject: "interface",
		Meaning: "A tunnel device that is down decapsulates no packets.",
		Remedy:  "set the device up",
	},
	{
		Code: TunnelMissing, Severity: condition.Error, Subject: "VIP",
		Meaning: "The balancer's packets arrive encapsulated, and nothing on this machine decapsulates them.",
		Remedy:  "run `shunt decap`",
	},
	{
		Code: TunnelMTU, Severity: condition.Warning, Subject: "VIP",
		Meaning: "Long packets do not fit once they are encapsulated: small requests work, and uploads hang.",
		Remedy:  "tell clients to send shorter segments with advmss, or raise the MTU between balancer and server",
	},
	{
		Code: ARPAnnounced, Severity: condition.Error, Subject: "interface",
		Meaning: "When the server asks for a neighbour's hardware address it may name the VIP as its own; a machine that receives this sends the VIP's packets to this server instead of the balancer.",
		Remedy:  "set arp_announce to 2",
	},
	{
		Code: ARPAnswered, Severity: condition.Error, Subject: "interface",
		Meaning: "The server answers ARP for addresses that are on other interfaces, the VIP on lo among them, and so takes the balancer's packets.",
		Remedy:  "set arp_ignore to 1",
	},
	{
		Code: VIPMissing, Severity: condition.Error, Subject: "VIP",
		Meaning: "The balancer leaves the VIP in the packet as its destination; a server without that address does not take it.",
		Remedy:  "add the VIP to lo",
	},
	{
		Code: VIPVisible, Severity: condition.Error, Subject: "VIP",
		Meaning: "For an address on an Ethernet interface the server answers ARP and neighbour solicitations, and so takes the balancer's packets.",
		Remedy:  "move the VIP to lo",
	},
}

// Lookup finds a code's definition, here or among the conditions of other packages.
func Lookup(code string) (condition.Definition, bool) {
	for _, d := range Codes {
		if d.Code == code {
			return d, true
		}
	}
	return condition.Lookup(code)
}
