package condition

// The codes. A code is never renamed and never reused for another meaning.
const (
	AddressContested       = "address_contested"
	AddressInUse           = "address_in_use"
	AddressTakenOver       = "address_taken_over"
	AggregationSwitchedOff = "aggregation_switched_off"
	AnnounceFailed         = "announce_failed"
	AttachDegraded         = "attach_degraded"
	AttachFailed           = "attach_failed"
	ChecksFailHere         = "checks_fail_here"
	ChecksLate             = "checks_late"
	ClockStepped           = "clock_stepped"
	ConfigRefused          = "config_refused"
	FlowsClosed            = "flows_closed"
	FlowsFull              = "flows_full"
	FramesMissed           = "frames_missed"
	FramesRefused          = "frames_refused"
	GatewaySilent          = "gateway_silent"
	HealthNotBelieved      = "health_not_believed"
	InterfaceMissing       = "interface_missing"
	MacvlanTakesFrames     = "macvlan_takes_frames"
	MulticastLinkOnly      = "multicast_link_only"
	NameNotResolved        = "name_not_resolved"
	NameUnusable           = "name_unusable"
	NATSourceGone          = "nat_source_gone"
	NeighbourNotManaged    = "neighbour_not_managed"
	NeighbourUnresolved    = "neighbour_unresolved"
	NetworkLeftAlone       = "network_left_alone"
	NoBackend              = "no_backend"
	NodeDraining           = "node_draining"
	OverridesLost          = "overrides_lost"
	OverridesUnsaved       = "overrides_unsaved"
	PeerAggregates         = "peer_aggregates"
	PeerHidesTags          = "peer_hides_tags"
	PodLeftAlone           = "pod_left_alone"
	PodsMissing            = "pods_missing"
	PodsUnjudged           = "pods_unjudged"
	PortsShort             = "ports_short"
	ProductFailed          = "product_failed"
	ReconcileFailing       = "reconcile_failing"
	RememberedFull         = "remembered_full"
	SocketsRefused         = "sockets_refused"
	SteerLeft              = "steer_left"
	TagOffloadSwitchedOff  = "tag_offload_switched_off"
	TagsHidden             = "tags_hidden"
	UDPBusyPollOff         = "udp_busy_poll_off"
	UDPDropped             = "udp_dropped"
	UDPKernelSocket        = "udp_kernel_socket"
	UDPLeaseFailed         = "udp_lease_failed"
	UDPModeReduced         = "udp_mode_reduced"
	UDPQueueMissed         = "udp_queue_missed"
)

// Definition describes a code for the reference documentation.
type Definition struct {
	Code     string   `json:"code"`
	Severity Severity `json:"severity"` // unless its raiser sets another
	Subject  string   `json:"subject"`  // the kind of thing that Condition.Subject names
	Meaning  string   `json:"meaning"`
	Remedy   string   `json:"remedy"` // unless its raiser has a better one
}

// Codes has all conditions, sorted by code. The reference page is made from it.
var Codes = []Definition{
	{
		Code: AddressContested, Severity: Error, Subject: "address on interface",
		Meaning: "Since shunt claimed this address, another host answers for it, too. shunt keeps the address and announces it again, at most every 10 seconds. Of two instances of shunt the one with the lower MAC address keeps it. The condition ends when shunt has not heard the other host for half a minute.",
		Remedy:  "remove the address from the host with the named hardware address, or remove it from shunt's configuration",
	},
	{
		Code: AddressInUse, Severity: Error, Subject: "address on interface",
		Meaning: "Another host answered when shunt asked whether a host has this address, so shunt does not answer for it. shunt asks again from time to time.",
		Remedy:  "remove the address from the host with the named hardware address, or remove it from shunt's configuration; shunt starts answering by itself when the address is free",
	},
	{
		Code: AddressTakenOver, Severity: Warning, Subject: "address on interface",
		Meaning: "Another node is chosen to announce this address of a load balancer, and this node stands by. No host answered when this node asked for the address, so it announces the address now. It leaves the address to the chosen node when that node asks for it.",
		Remedy:  "find out why the chosen node does not answer; when the cluster has noticed that the node is gone, it chooses another node",
	},
	{
		Code: AggregationSwitchedOff, Severity: Info, Subject: "interface",
		Meaning: "The interface runs in generic mode, in which packets merged by the kernel would reach the program. shunt switched merging off, and switches it on again when it detaches.",
		Remedy:  "do nothing, or use native mode, which does not need it",
	},
	{
		Code: AnnounceFailed, Severity: Error, Subject: "address on interface",
		Meaning: "shunt failed to ask whether the address is free, or to tell the network that the address is here. shunt tries again.",
		Remedy:  "check that the interface exists and is up",
	},
	{
		Code: AttachDegraded, Severity: Warning, Subject: "interface",
		Meaning: "The driver does not accept the program in native mode. The program runs in generic mode, which is slower.",
		Remedy:  "use a driver with native XDP, or set `attach: generic` to accept generic mode",
	},
	{
		Code: AttachFailed, Severity: Error, Subject: "interface",
		Meaning: "shunt could not attach the program to the interface, so the interface's traffic is not balanced.",
		Remedy:  "fix the fault that the text names; shunt tries again every second",
	},
	{
		Code: ChecksFailHere, Severity: Error, Subject: "host",
		Meaning: "shunt cannot make health checks, because this machine has no file descriptors, memory, local ports or processes left, or because checks with direct return find no route like the one of clients' packets. This says nothing about the backends, so their states do not change.",
		Remedy:  "fix the error that the text names; for \"too many open files\", raise LimitNOFILE of the service (at most 4,096 checks run at once)",
	},
	{
		Code: ChecksLate, Severity: Warning, Subject: "host",
		Meaning: "More than one in a hundred health checks start at least a quarter of a second late.",
		Remedy:  "give the machine more CPU, or lengthen `health.interval`; for `exec` checks, of which at most 64 run at once, shorten `health.timeout`",
	},
	{
		Code: ClockStepped, Severity: Info, Subject: "wall clock",
		Meaning: "A person or a program set the wall clock, or the machine slept. Deadlines of drains are times of the wall clock, so shunt moved them: each drain still takes as long as it was given. Traffic uses clocks that nobody sets.",
		Remedy:  "do nothing; the condition ends after ten minutes",
	},
	{
		Code: ConfigRefused, Severity: Error, Subject: "configuration file",
		Meaning: "The configuration on disk has faults. The configuration that was applied before it stays in force.",
		Remedy:  "run `shunt check` on the file and fix the faults that it reports",
	},
	{
		Code: FlowsClosed, Severity: Warning, Subject: "service",
		Meaning: "Backends of the service are down, and it has on_down: close, so shunt ended the flows that were with them. A client that goes on gets a reset, and connects again. The text has the number of open flows at the last time; with direct return they are not counted.",
		Remedy:  "find out why the backends went down (`shunt backend list`); if their connections were to stay, set `on_down: keep`; the condition ends after ten minutes",
	},
	{
		Code: FlowsFull, Severity: Error, Subject: "instance",
		Meaning: "The flow table had no room for new flows under nat. Such a flow is dropped (table_full), or it keeps the idle timeout of an unfinished handshake (flows_full). Existing flows go on.",
		Remedy:  "raise `limits.flows`, which takes effect when the data plane is loaded anew; limit a service with `max_flows`, or a source address with `max_new_flows_per_source`. If the daemon has a memory limit (MemoryMax=), `shunt check` says how much memory the limits need",
	},
	{
		Code: FramesMissed, Severity: Warning, Subject: "interface",
		Meaning: "Frames came to the interface faster than the kernel took them out of its receive ring. Frames for which the ring had no room were dropped before any program saw them.",
		Remedy:  "give a network card a longer ring (`ethtool -G NAME rx 4096`) and more queues on more CPUs (`ethtool -L NAME combined N`). For a veth, which has room for 256 frames, set a queueing discipline at its other end (`tc qdisc replace dev PEER root pfifo`): the sender then waits, from Linux 6.16 on",
	},
	{
		Code: FramesRefused, Severity: Warning, Subject: "instance",
		Meaning: "The kernel refused frames after the program had decided to send them.",
		Remedy:  "on a veth: `ethtool -K PEER gro on` at its other end, or `attach: generic` here; on a card: lengthen its transmit ring, which is too short (`ethtool -G INTERFACE tx N`)",
	},
	{
		Code: GatewaySilent, Severity: Warning, Subject: "gateway on interface",
		Meaning: "A gateway that a route of this host names, on an interface that shunt is attached to, does not answer ARP or neighbour solicitations. Clients behind it may get no answers. When the kernel has given the gateway up, which takes up to a minute, shunt answers each client through the hop that the client's packets come from.",
		Remedy:  "check the router, its cable and its VLAN: `ip neighbour show`; remove the route if the router is gone for good",
	},
	{
		Code: HealthNotBelieved, Severity: Error, Subject: "service",
		Meaning: "Fewer backends of the service are up than `health.panic` allows, so these backends would have to carry the load of all. shunt does not believe the checks, and all backends take flows.",
		Remedy:  "look at the backends that `shunt backend list` shows as down, and at what the checks request",
	},
	{
		Code: InterfaceMissing, Severity: Error, Subject: "interface",
		Meaning: "A configured interface does not exist.",
		Remedy:  "create the interface, or remove it from the configuration",
	},
	{
		Code: MacvlanTakesFrames, Severity: Error, Subject: "macvlan",
		Meaning: "A macvlan above an interface that shunt is attached to takes frames to its own hardware address. It has a VIP, or the hardware address of a virtual router (VRRP), so it takes frames of services, and these are not balanced.",
		Remedy:  "list both, the interface and the macvlan, with `attach: tc`; or have VRRP use the interface's own hardware address (in keepalived without use_vmac)",
	},
	{
		Code: MulticastLinkOnly, Severity: Warning, Subject: "address on interface",
		Meaning: "The kernel refused to join the IPv6 solicited-node group for the address. The interface receives the group's packets, but switches that snoop MLD may not forward them here.",
		Remedy:  "switch MLD snooping off for this segment, or give the interface an IPv6 address so that the kernel can join",
	},
	{
		Code: NameNotResolved, Severity: Error, Subject: "name of a backend, and the record type",
		Meaning: "shunt cannot look up the name of a backend in the DNS. The addresses of the last answer stay in force, also after a restart; without an earlier answer the backends are missing.",
		Remedy:  "check the name, the resolvers in /etc/resolv.conf, and the route to them: `dig NAME A` and `dig NAME AAAA`; shunt asks again by itself, at the latest after 30 s",
	},
	{
		Code: NameUnusable, Severity: Warning, Subject: "service, and name of a backend",
		Meaning: "The DNS has addresses for the name of a backend that cannot be backends of the service, or more than max allows. shunt leaves those out.",
		Remedy:  "correct the records of the name, or raise the backend's `max`",
	},
	{
		Code: NATSourceGone, Severity: Warning, Subject: "address",
		Meaning: "NAT sent flows from an address that the host has not had for 10 seconds, and that is not listed under snat.addresses. Their backends' answers would arrive nowhere, so shunt ended these flows. A client that goes on gets a reset, and connects again.",
		Remedy:  "do nothing if you removed the address; otherwise give the host the address again, or list addresses that stay under `snat.addresses`; the condition ends after ten minutes",
	},
	{
		Code: NeighbourNotManaged, Severity: Warning, Subject: "host",
		Meaning: "The kernel does not keep next hops fresh by itself, so shunt asks for them again and again. While shunt does not run, a change of a next hop is not noticed.",
		Remedy:  "run Linux 5.16 or later, which has managed neighbours",
	},
	{
		Code: NeighbourUnresolved, Severity: Error, Subject: "backend address",
		Meaning: "There is no route to the backend, or its next hop does not answer ARP or neighbour solicitations. New flows, and the UDP flows of the backend, go to the service's other backends, as long as one of them can be reached.",
		Remedy:  "check that the backend is up, and check its route and its VLAN: `ip route get ADDRESS` and `ip neighbour show`",
	},
	{
		Code: NetworkLeftAlone, Severity: Warning, Subject: "network, or uplink of accelerate",
		Meaning: "Packets between pods of this host and this network go through the host's stack, because the host does something with them that the shortcut would skip, or because the route does not have exactly one plain next hop. Or the uplink leads to no network. docs/guide/pods.md lists the reasons.",
		Remedy:  "remove the rule, program or route that the condition names, if you do not need it; for an uplink, `ip route` shows which interface leads to other hosts' pods",
	},
	{
		Code: NoBackend, Severity: Error, Subject: "service, and the family where only one lacks backends",
		Meaning: "No backend of the service takes new flows: the service has no backend, or all its backends are down, drained or have weight 0. Flows that a backend still has go on.",
		Remedy:  "run `shunt backend list` to see what is wrong with each backend; then fix a server that is down, give a backend a weight, add a backend, or end a drain with `shunt backend undrain`",
	},
	{
		Code: NodeDraining, Severity: Info, Subject: "instance",
		Meaning: "The daemon was told to stop with --on-exit drain. No service takes new flows. shunt detaches the data plane when the existing flows have ended, or at --drain-timeout.",
		Remedy:  "wait, or end the drain at once with SIGINT",
	},
	{
		Code: OverridesLost, Severity: Error, Subject: "file of overrides",
		Meaning: "At a start, shunt could not read the overrides that operators had set (drains, weights, health). None of them is in force. shunt has moved the file aside.",
		Remedy:  "look at the file, set again the overrides that are still wanted (`shunt override list` shows the overrides in force), and remove the file",
	},
	{
		Code: OverridesUnsaved, Severity: Warning, Subject: "file of overrides",
		Meaning: "The overrides that operators have set (drains, weights, health) are in force, but they would not survive a restart.",
		Remedy:  "make room on the disk, or fix the permissions; shunt tries again every second",
	},
	{
		Code: PeerAggregates, Severity: Warning, Subject: "interface",
		Meaning: "The interface runs in generic mode. A device that merges packets before they reach it lies in a network namespace that shunt cannot enter: the other end of a veth pair, or the parent of a VLAN.",
		Remedy:  "switch that off there with the command that the condition names",
	},
	{
		Code: PeerHidesTags, Severity: Warning, Subject: "interface",
		Meaning: "The interface is the parent of VLANs in native mode and is one end of a veth pair. The other end sends VLAN tags beside the frames, where the program does not see them, and it lies in a network namespace that shunt cannot enter. Frames of the VLANs look like the parent's own.",
		Remedy:  "switch that off at the other end with the command that the condition names",
	},
	{
		Code: PodLeftAlone, Severity: Warning, Subject: "interface of accelerate",
		Meaning: "All packets of this pod, or of one of its addresses, go through the host's stack, because the host does something with them that the shortcut would skip, or because the pod cannot use the shortcut. docs/guide/pods.md lists the reasons.",
		Remedy:  "remove the rule, qdisc or program that the condition names, if you do not need it; or leave the interface out of accelerate",
	},
	{
		Code: PodsMissing, Severity: Info, Subject: "accelerate",
		Meaning: "No interface of this host is the host's end of a pod's veth that accelerate covers. shunt finds pods when they start.",
		Remedy:  "do nothing while no pod runs; otherwise compare `ip -details link show type veth` with accelerate's interfaces",
	},
	{
		Code: PodsUnjudged, Severity: Error, Subject: "accelerate",
		Meaning: "shunt cannot find out whether pods may take the shortcut. One second later all their packets go through the host's stack, until it can.",
		Remedy:  "provide the thing that the condition says is missing; shunt tries again twice a second",
	},
	{
		Code: PortsShort, Severity: Warning, Subject: "instance",
		Meaning: "Source ports towards a backend are short. New flows are dropped (ports_exhausted), or take a port before its rest has ended (port_taken).",
		Remedy:  "add addresses under `snat.addresses`, or add backends",
	},
	{
		Code: ProductFailed, Severity: Error, Subject: "product",
		Meaning: "shunt could not start a product that the configuration file names; the text has the reason. The other products run. shunt tries again every 5 seconds.",
		Remedy:  "remove the cause that the text names; shunt then starts the product by itself",
	},
	{
		Code: ReconcileFailing, Severity: Error, Subject: "data plane",
		Meaning: "shunt failed to write the configuration into the kernel's maps. shunt tries again, and the existing entries go on working.",
		Remedy:  "read in the text which map failed and with which error; for a full map, raise its size under `limits`",
	},
	{
		Code: RememberedFull, Severity: Warning, Subject: "instance",
		Meaning: "While tables change, shunt remembers direct-return flows and the clients of services with affinity. There was no room for some of them, or more new ones came in a second than a twentieth of the room. A flow that is not remembered stays with the backend that it had before the change, and may be lost when its slot settles.",
		Remedy:  "raise `limits.remembered`, which takes effect when the data plane is loaded anew",
	},
	{
		Code: SocketsRefused, Severity: Error, Subject: "sockets",
		Meaning: "accelerate's key sockets is in the file, and no sockets are paired: this kernel breaks a feature of paired sockets that programs may use, or shunt could not load or attach its programs. Connections go by TCP as without the key.",
		Remedy:  "read in the text which operation fails: list it under `unused` if none of the programs uses it, name existing cgroups, or leave sockets out",
	},
	{
		Code: SteerLeft, Severity: Warning, Subject: "entry of accelerate's steer",
		Meaning: "Packets of this entry follow the host's routes, because its interface or its next hop is gone, or because the host does something with them at that interface that the shortcut would skip. docs/guide/pods.md lists the reasons.",
		Remedy:  "look at the interface and the next hop that the condition names: `ip link` and `ip neighbour show`; shunt uses them again as soon as they work",
	},
	{
		Code: TagOffloadSwitchedOff, Severity: Info, Subject: "interface",
		Meaning: "The interface is the parent of VLANs in native mode. Its driver would remove the tags before the program sees the frames. shunt switched that off, and switches it on again when it detaches.",
		Remedy:  "do nothing, or use `attach: tc` for the VLANs, which does not need it",
	},
	{
		Code: TagsHidden, Severity: Warning, Subject: "interface",
		Meaning: "The interface has VLANs, none of them in native mode, and its driver removes the tags before the program sees the frames. Frames of the VLANs that are for a VIP are balanced as if they had come in without a tag.",
		Remedy:  "switch off the offloads that the condition names with ethtool (`ethtool -K eth0 rxvlan off`; at the other end of a veth, txvlan), and such frames pass; or use `attach: tc` for the interface, which sees the tags",
	},
	{
		Code: UDPBusyPollOff, Severity: Warning, Subject: "interface, or the instance",
		Meaning: "An entry of udp has busy_poll, and shunt could not switch the interrupts of its interface off, or could not restore them. Leases work, with interrupts as well. shunt tries again every second.",
		Remedy:  "provide the thing that the condition says is missing: usually /sys is not writable (with systemd: ProtectKernelTunables=no in a drop-in)",
	},
	{
		Code: UDPDropped, Severity: Info, Subject: "lease of udp",
		Meaning: "No program has the lease, and its entry has on_no_socket: drop, so its datagrams are dropped.",
		Remedy:  "start the program that asks for the lease; `shunt udp show` shows how the last lease ended, and how many datagrams were dropped",
	},
	{
		Code: UDPKernelSocket, Severity: Info, Subject: "lease of udp",
		Meaning: "No program has the lease, so the kernel's socket on the same port gets the datagrams, if there is one.",
		Remedy:  "start the program that asks for the lease; `shunt udp show` shows how the last lease ended",
	},
	{
		Code: UDPLeaseFailed, Severity: Error, Subject: "lease of udp",
		Meaning: "No program can get this lease, or not every program that it allows: its interface is missing or refuses the XDP program, or this machine does not have a user or a group that allow names. shunt tries again every second.",
		Remedy:  "provide the thing that the condition says is missing; shunt notices by itself",
	},
	{
		Code: UDPModeReduced, Severity: Info, Subject: "lease of udp",
		Meaning: "With mode auto the kernel copies each datagram into the program's memory, or the interface runs in generic mode: the driver cannot do better, for the reason that the condition names.",
		Remedy:  "do nothing, or use a network card whose driver has AF_XDP zero-copy",
	},
	{
		Code: UDPQueueMissed, Severity: Warning, Subject: "lease of udp",
		Meaning: "A program has the lease, and datagrams of the lease arrived on receive queues that are not in the lease. They went to the kernel's socket, or were dropped if the entry has on_no_socket: drop.",
		Remedy:  "add the queues to the entry (`queues: all`), or steer the port to the queues of the lease (`ethtool -N`)",
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
