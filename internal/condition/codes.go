package condition

// The codes. A code is never renamed and never reused for another meaning.
const (
	AddressInUse           = "address_in_use"
	AggregationSwitchedOff = "aggregation_switched_off"
	AnnounceFailed         = "announce_failed"
	AttachDegraded         = "attach_degraded"
	AttachFailed           = "attach_failed"
	ChecksFailHere         = "checks_fail_here"
	ChecksLate             = "checks_late"
	ClockStepped           = "clock_stepped"
	ConfigRefused          = "config_refused"
	FlowsFull              = "flows_full"
	FramesMissed           = "frames_missed"
	FramesRefused          = "frames_refused"
	HealthNotBelieved      = "health_not_believed"
	InterfaceMissing       = "interface_missing"
	MulticastLinkOnly      = "multicast_link_only"
	NeighbourNotManaged    = "neighbour_not_managed"
	NeighbourUnresolved    = "neighbour_unresolved"
	NoBackend              = "no_backend"
	NodeDraining           = "node_draining"
	OverridesLost          = "overrides_lost"
	OverridesUnsaved       = "overrides_unsaved"
	PeerAggregates         = "peer_aggregates"
	PortsShort             = "ports_short"
	ReconcileFailing       = "reconcile_failing"
	RememberedFull         = "remembered_full"
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
		Remedy:  "fix what the text names; shunt tries again every second",
	},
	{
		Code: ChecksFailHere, Severity: Error, Subject: "host",
		Meaning: "Health checks cannot be made for want of something on this machine: file descriptors, memory, local ports or processes. That says nothing about the backends, so they stay what they were.",
		Remedy:  "the text names the error: for \"too many open files\" raise LimitNOFILE of the service; at most 4,096 checks run at once",
	},
	{
		Code: ChecksLate, Severity: Warning, Subject: "host",
		Meaning: "More than one in a hundred health checks start a quarter of a second or more after their time.",
		Remedy:  "give the machine more CPU, or lengthen `health.interval`; of `exec` checks at most 64 run at once: shorten `health.timeout`",
	},
	{
		Code: ClockStepped, Severity: Info, Subject: "wall clock",
		Meaning: "Somebody set the wall clock, or the machine slept. Deadlines of drains are moments of that clock, so they were moved along: each drain takes as long as it was given. Traffic goes by clocks that nobody sets.",
		Remedy:  "nothing; it goes after ten minutes",
	},
	{
		Code: ConfigRefused, Severity: Error, Subject: "configuration file",
		Meaning: "The configuration on disk has faults; the one applied before it stays in force.",
		Remedy:  "run `shunt check` on the file and fix what it names",
	},
	{
		Code: FlowsFull, Severity: Error, Subject: "instance",
		Meaning: "The table of flows had no room for new ones under nat: they are dropped (table_full), or end when they are idle for as long as an unfinished handshake may be (flows_full). Flows that are there go on.",
		Remedy:  "raise `limits.flows`, which takes effect when the data plane is loaded anew; bound a service with `max_flows`, or a source with `max_new_flows_per_source`. Where a memory limit is set for the daemon (MemoryMax=), `shunt check` says how much the limits need",
	},
	{
		Code: FramesMissed, Severity: Warning, Subject: "interface",
		Meaning: "Frames came to the interface faster than they were taken out of its receive ring. Those that found no room were dropped before any program saw them.",
		Remedy:  "a card: give it a longer ring (`ethtool -G NAME rx 4096`) and more queues on more CPUs (`ethtool -L NAME combined N`). A veth has room for 256 frames: with a queueing discipline at its other end (`tc qdisc replace dev PEER root pfifo`) the sender waits instead, from Linux 6.16 on",
	},
	{
		Code: FramesRefused, Severity: Warning, Subject: "instance",
		Meaning: "The kernel refused frames after the program had decided to send them.",
		Remedy:  "if the interface is a veth, its other end needs GRO switched on or an XDP program; otherwise its transmit ring is too short",
	},
	{
		Code: HealthNotBelieved, Severity: Error, Subject: "service",
		Meaning: "Fewer backends of the service are up than `health.panic` allows, so that those that are would have to bear the load of all. The checks are not believed, and all backends take flows.",
		Remedy:  "look at the backends that `shunt backend list` shows as down, and at what the checks ask for",
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
		Meaning: "There is no route to the backend, or its next hop does not answer ARP or neighbour solicitations. New flows, and UDP flows that it has, go to the service's other backends, as long as one of them can be reached.",
		Remedy:  "check that the backend is up, its route and its VLAN: `ip route get ADDRESS` and `ip neighbour show`",
	},
	{
		Code: NoBackend, Severity: Error, Subject: "service, and the family where only one lacks backends",
		Meaning: "No backend of the service takes new flows: it has none, or all are down, drained or have weight 0. Flows that a backend still has go on.",
		Remedy:  "`shunt backend list` says what is wrong with each: repair a server that is down, give one a weight, add one, or `shunt backend undrain` one",
	},
	{
		Code: NodeDraining, Severity: Info, Subject: "instance",
		Meaning: "The daemon was told to stop with --on-exit drain. No service takes new flows, and the data plane is detached when the flows there are have ended, or at --drain-timeout.",
		Remedy:  "wait, or end it at once with SIGINT",
	},
	{
		Code: OverridesLost, Severity: Error, Subject: "file of overrides",
		Meaning: "What operators had said beside the configuration (drains, weights, health) could not be read at a start; none of it is in force. The file is kept aside.",
		Remedy:  "look at the file, set the overrides again that are still wanted (`shunt override list` shows those in force), and remove it",
	},
	{
		Code: OverridesUnsaved, Severity: Warning, Subject: "file of overrides",
		Meaning: "What operators say beside the configuration (drains, weights, health) is in force, but would not survive a restart.",
		Remedy:  "make room on the disk or fix the permissions; it is tried again every second",
	},
	{
		Code: PeerAggregates, Severity: Warning, Subject: "interface",
		Meaning: "The interface runs in generic mode and is one end of a veth pair whose other end sends merged packets; it lies in a network namespace that cannot be entered from here.",
		Remedy:  "switch segmentation offload off at the other end with the command named",
	},
	{
		Code: PortsShort, Severity: Warning, Subject: "instance",
		Meaning: "Source ports towards a backend are short: new flows are dropped (ports_exhausted), or take a port that still rested (port_taken).",
		Remedy:  "add addresses under `snat.addresses`, or more backends",
	},
	{
		Code: ReconcileFailing, Severity: Error, Subject: "data plane",
		Meaning: "Writing the configuration into the kernel's maps failed; it is tried again, and what was there goes on working.",
		Remedy:  "read the text for the map and the error; a full map is sized under `limits`",
	},
	{
		Code: RememberedFull, Severity: Warning, Subject: "instance",
		Meaning: "While tables change, flows of direct return and clients of affinity are remembered; there was no room for some, or more new ones came in a second than a twentieth of the room. Such a flow stays with the backend that it had before the change, and may be lost when its slot settles.",
		Remedy:  "raise `limits.remembered`, which takes effect when the data plane is loaded anew",
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
