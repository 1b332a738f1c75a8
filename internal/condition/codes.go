package condition

// The codes. A code is never renamed and never reused for another meaning.
const (
	AddressInUse           = "address_in_use"
	AggregationSwitchedOff = "aggregation_switched_off"
	AnnounceFailed         = "announce_failed"
	AttachDegraded         = "attach_degraded"
	AttachFailed           = "attach_failed"
	ConfigRefused          = "config_refused"
	FramesRefused          = "frames_refused"
	InterfaceMissing       = "interface_missing"
	MulticastLinkOnly      = "multicast_link_only"
	NeighbourNotManaged    = "neighbour_not_managed"
	NeighbourUnresolved    = "neighbour_unresolved"
	NoBackend              = "no_backend"
	OverridesLost          = "overrides_lost"
	OverridesUnsaved       = "overrides_unsaved"
	PeerAggregates         = "peer_aggregates"
	PortsShort             = "ports_short"
	ReconcileFailing       = "reconcile_failing"
)

// Definition describes a code for the reference documentation.
type Definition struct {
	Code     string   `json:"code"`
	Severity Severity `json:"severity"` // unless the one who raises it says otherwise
	Subject  string   `json:"subject"`  // what Condition.Subject names
	Meaning  string   `json:"meaning"`
	Remedy   string   `json:"remedy"` // unless the one who raises it knows better
}

// Codes is every condition there is, sorted by code. The reference page is made from it.
var Codes = []Definition{
	{
		Code: AddressInUse, Severity: Error, Subject: "address on interface",
		Meaning: "Another host answered when asked whether anybody has this address, so shunt does not answer for it. It asks again from time to time.",
		Remedy:  "take the address off the host with the hardware address named, or take it out of shunt's configuration; shunt starts answering by itself once it is free",
	},
	{
		Code: AggregationSwitchedOff, Severity: Info, Subject: "interface",
		Meaning: "The interface runs in generic mode, where packets merged by the kernel would reach the program, so merging was switched off. It is switched on again when shunt detaches.",
		Remedy:  "nothing; native mode does not need it",
	},
	{
		Code: AnnounceFailed, Severity: Error, Subject: "address on interface",
		Meaning: "Asking whether the address is free, or telling the network that it is here, failed. It is tried again.",
		Remedy:  "check that the interface exists and is up",
	},
	{
		Code: AttachDegraded, Severity: Warning, Subject: "interface",
		Meaning: "The driver does not take the program in native mode, so it runs in generic mode, which is slower.",
		Remedy:  "use a driver with native XDP, or say `attach: generic` to accept it",
	},
	{
		Code: AttachFailed, Severity: Error, Subject: "interface",
		Meaning: "The program could not be attached to the interface; its traffic is not balanced.",
		Remedy:  "run `shunt doctor` to see what is in the way",
	},
	{
		Code: ConfigRefused, Severity: Error, Subject: "configuration file",
		Meaning: "The configuration on disk has faults; the one applied before it stays in force.",
		Remedy:  "run `shunt check` on the file and mend what it names",
	},
	{
		Code: FramesRefused, Severity: Warning, Subject: "interface",
		Meaning: "The kernel refused frames after the program had decided to send them.",
		Remedy:  "if the interface is a veth, its other end needs GRO switched on or an XDP program; otherwise its transmit ring is too short",
	},
	{
		Code: InterfaceMissing, Severity: Error, Subject: "interface",
		Meaning: "A configured interface does not exist.",
		Remedy:  "create the interface or take it out of the configuration",
	},
	{
		Code: MulticastLinkOnly, Severity: Warning, Subject: "address on interface",
		Meaning: "The kernel refused to join the IPv6 solicited-node group for the address. The interface receives the group, but switches that snoop MLD may not forward it here.",
		Remedy:  "switch MLD snooping off for this segment, or give the interface an IPv6 address so that the kernel can join",
	},
	{
		Code: NeighbourNotManaged, Severity: Warning, Subject: "host",
		Meaning: "The kernel does not keep next hops fresh by itself, so shunt asks again and again; while shunt is not running a next hop that changes is not noticed.",
		Remedy:  "run Linux 5.16 or later, which has managed neighbours",
	},
	{
		Code: NeighbourUnresolved, Severity: Error, Subject: "backend address",
		Meaning: "There is no route to the backend, or its next hop does not answer ARP or neighbour solicitations.",
		Remedy:  "check that the backend is up, its route and its VLAN: `ip route get ADDRESS` and `ip neighbour show`",
	},
	{
		Code: NoBackend, Severity: Error, Subject: "service, and the family where only one lacks backends",
		Meaning: "No backend of the service takes new flows: it has none, or all have weight 0 or are drained. Flows that a backend still has go on.",
		Remedy:  "give a backend a weight, add one, or `shunt backend undrain` one",
	},
	{
		Code: OverridesLost, Severity: Error, Subject: "file of overrides",
		Meaning: "What operators had asked for beside the configuration (drains) could not be read after a restart; none of it is in force.",
		Remedy:  "drain the backends again that were drained; the next drain replaces the file",
	},
	{
		Code: OverridesUnsaved, Severity: Warning, Subject: "file of overrides",
		Meaning: "What operators ask for beside the configuration (drains) is in force, but would not survive a restart.",
		Remedy:  "make room on the disk or mend the permissions; it is tried again every second",
	},
	{
		Code: PeerAggregates, Severity: Warning, Subject: "interface",
		Meaning: "The interface runs in generic mode and is one end of a veth pair whose other end sends merged packets; it lies in a network namespace that cannot be entered from here.",
		Remedy:  "switch segmentation offload off at the other end with the command named",
	},
	{
		Code: PortsShort, Severity: Warning, Subject: "source address and backend",
		Meaning: "Nearly all source ports towards a backend are taken; new connections may be refused.",
		Remedy:  "add addresses under `snat.addresses`, or more backends",
	},
	{
		Code: ReconcileFailing, Severity: Error, Subject: "data plane",
		Meaning: "Writing the configuration into the kernel's maps failed; it is tried again, and what was there goes on working.",
		Remedy:  "read the text for the map and the error; a full map is sized under `limits`",
	},
}

// Lookup finds a code's definition.
func Lookup(code string) (Definition, bool) {
	for _, d := range Codes {
		if d.Code == code {
			return d, true
		}
	}
	return Definition{}, false
}
