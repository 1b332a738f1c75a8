package file

import "github.com/shunt-lb/shunt/internal/config"

// The format of the file, once: package config makes the parser, the JSON Schema, the guide and every
// suggestion of these structs and their tags.

// document is a whole file.
type document struct {
	config.Mark   `json:"-"`
	Interfaces    config.List[interfaceEntry] `json:"interfaces" doc:"The network interfaces that shunt attaches to: those that packets of clients arrive on, and those that backends are behind." example:"[{name: eth0}]"`
	Services      config.List[serviceEntry]   `json:"services" doc:"What is balanced." example:"[{name: web, address: 192.0.2.10, port: 80, backends: [{address: 10.0.0.2}]}]"`
	Defaults      defaultsEntry               `json:"defaults,omitempty" doc:"For services that do not say." example:"{forwarding: nat}"`
	Timeouts      timeoutsEntry               `json:"timeouts,omitempty" doc:"When idle flows end, counted from the last packet in either direction." example:"{udp: 2m}"`
	Limits        limitsEntry                 `json:"limits,omitempty" doc:"Sizes of the maps, fixed when the data plane is first loaded. 'shunt check' prints what they cost in memory." example:"{flows: 1000000}"`
	SNAT          snatEntry                   `json:"snat,omitempty" doc:"Where full NAT takes its source addresses and ports from." example:"{addresses: [10.0.0.1]}"`
	Encapsulation encapsulationEntry          `json:"encapsulation,omitempty" doc:"What the outer headers of dsr-ipip and dsr-gue look like." example:"{source: 10.0.0.1}"`
	API           apiEntry                    `json:"api,omitempty" doc:"Where the daemon can be asked, and who may, besides root." example:"{group: shunt-admin, read_group: shunt}"`
	Pools         config.Later                `json:"pools,omitempty" doc:"Backends shared by services." instead:"write the backends in each service; a YAML anchor (x-servers: &servers) lets services share them"`
	Metrics       config.Later                `json:"metrics,omitempty" doc:"Metrics over HTTP." instead:"'shunt status --output json' has the counters"`
	BGP           config.Later                `json:"bgp,omitempty" doc:"Sessions with routers." instead:"write announce: none, and announce the VIPs with a routing daemon such as BIRD or FRR"`
}

// interfaceEntry is one of interfaces.
type interfaceEntry struct {
	config.Mark `json:"-"`
	Name        config.Text `json:"name" doc:"The interface's name on this machine." min:"1" max:"15" example:"eth0"`
	Attach      config.Word `json:"attach,omitempty" doc:"How to attach: native is XDP in the driver, generic is XDP in the kernel's stack (slower), auto tries native first and says which it got; tc is the kernel's traffic control (tcx, or clsact before Linux 6.6), which also serves connections from this machine to its VIPs, and backends on it." enum:"auto|native|generic|tc" default:"auto" example:"native"`
}

// defaultsEntry is defaults.
type defaultsEntry struct {
	config.Mark `json:"-"`
	Forwarding  config.Word  `json:"forwarding,omitempty" doc:"How packets reach a backend." enum:"nat|nat-destination|dsr-l2|dsr-ipip|dsr-gue" default:"nat" example:"nat-destination"`
	Announce    config.Word  `json:"announce,omitempty" doc:"How the network learns where a VIP is." enum:"l2|none" later:"bgp: write none, and announce the VIPs with a routing daemon such as BIRD or FRR" default:"l2" example:"none"`
	Health      healthEntry  `json:"health,omitempty" doc:"How backends are checked. What a service's own health says takes precedence, key by key; of tcp, http, https, grpc, udp and exec it replaces the one here." example:"{tcp: {}, interval: 5s}"`
	Timeouts    config.Later `json:"timeouts,omitempty" doc:"Timeouts per service." instead:"set timeouts at the top of the file, for all services"`
}

// serviceEntry is one of services.
type serviceEntry struct {
	config.Mark          `json:"-"`
	Name                 config.Text                 `json:"name" doc:"The service's name, unique. Where flows are placed depends on it: a service that is renamed places its flows anew." min:"1" max:"63" example:"web"`
	Address              config.Many[config.Address] `json:"address" doc:"The VIPs: addresses that clients connect to. Every address, port and protocol together is a frontend of the service." example:"[192.0.2.10, \"2001:db8::10\"]"`
	Port                 config.Many[config.Ports]   `json:"port" doc:"A port, a range, or any. An exact port beats a range, and a range beats any; every other overlap is an error." example:"[80, 443, \"8000-8099\"]"`
	Protocol             config.Many[config.Word]    `json:"protocol,omitempty" doc:"The transport protocol." enum:"tcp|udp" later:"sctp: leave the service out, packets of other protocols than TCP and UDP pass to the host|quic: write udp, QUIC is carried as any UDP (a client that changes its address may reach another backend)" default:"tcp" example:"[tcp, udp]"`
	Forwarding           config.Word                 `json:"forwarding,omitempty" doc:"How packets reach a backend: nat rewrites source and destination and works from anywhere; nat-destination rewrites the destination only, and needs this machine to be the backends' route back to the clients. With dsr-* (direct server return) the backend has the VIP itself and answers the client directly: dsr-l2 changes the MAC addresses only, for backends on the same link; dsr-ipip wraps the packet in another IP header, dsr-gue in UDP as well (GUE), for backends anywhere." enum:"nat|nat-destination|dsr-l2|dsr-ipip|dsr-gue" inherits:"defaults.forwarding" example:"nat-destination"`
	Tracking             config.Word                 `json:"tracking,omitempty" doc:"Which flows are remembered, with dsr-* or affinity: auto, those that a change of the backends would move otherwise; always, every flow from its first packet; none, no flow, so that a change moves flows. Under nat without affinity it has no meaning, because every flow is remembered there." enum:"auto|always|none" default:"auto" example:"always"`
	Affinity             config.Word                 `json:"affinity,omitempty" doc:"Whether more than the flow decides the backend: with client-ip all flows of a client's address go to one backend." enum:"none|client-ip" default:"none" example:"client-ip"`
	AffinityTimeout      config.Duration             `json:"affinity_timeout,omitempty" doc:"How long a client stays with its backend after its last packet, where the backends have changed meanwhile. Only with affinity." min:"1s" max:"12h" default:"3h" example:"30m"`
	Hash                 config.Word                 `json:"hash,omitempty" doc:"What decides a flow's slot in the table: flow, addresses and ports, so that a client's flows are spread; addresses, the client's and the VIP's alone. Fragments behind the first have no ports: with addresses and dsr-* they reach the right backend through any balancer of several, and before their first one, while the slot is not changing. Changing it moves flows." enum:"flow|addresses" later:"least-connections: give the backends weights, by which Maglev hashing spreads new flows" default:"flow" example:"addresses"`
	Announce             config.Word                 `json:"announce,omitempty" doc:"How the network learns where the VIPs are: l2 answers ARP and neighbour solicitations for them; none leaves them to routing." enum:"l2|none" later:"bgp: write none, and announce the VIPs with a routing daemon such as BIRD or FRR" inherits:"defaults.announce" example:"none"`
	OnNoBackend          config.Word                 `json:"on_no_backend,omitempty" doc:"What becomes of a packet while no backend takes new flows (there is none, or all have weight 0 or are drained): reject answers at once, TCP with a reset and UDP with an ICMP 'port unreachable'; drop says nothing, and the client waits in vain. Either way it is counted, and flows that a backend still has go on." enum:"reject|drop" default:"reject" example:"drop"`
	AllowFrom            config.Many[config.Prefix]  `json:"allow_from,omitempty" doc:"Source addresses that may use the service. With any here, all that are in neither list may not. Of the prefixes of both lists that a source is in, the longest decides. Who may not gets no answer. It is asked when a flow begins: under nat flows go on that were there before; with dsr-* every packet is asked, which costs a look-up each and ends flows at once. Ping is answered regardless." example:"[198.51.100.0/24, \"2001:db8:9::/48\"]"`
	DenyFrom             config.Many[config.Prefix]  `json:"deny_from,omitempty" doc:"Source addresses that may not use the service: exceptions to allow_from, or to everybody where that is empty." example:"[203.0.113.0/24]"`
	MaxNewFlowsPerSource config.Rate                 `json:"max_new_flows_per_source,omitempty" doc:"How many flows each source address may begin per second; of IPv6 each /64. Without it: as many as come. Up to a second's worth may come at once; what is beyond is dropped. With dsr-* it counts TCP SYNs, retransmitted ones too, and cannot be used for udp. 65536 sources are remembered: in a flood from more, the one unseen for the longest time is forgotten and has its second's worth again." min:"1" max:"1000000" example:"100/s"`
	MaxFlows             config.Number               `json:"max_flows,omitempty" unit:"flows" doc:"How many flows the service may have at once, under nat and nat-destination; a packet that would begin another is dropped. Without it: as many as limits.flows has room for. It counts those begun since it was set: the established ones, those in handshake, and closed ones until their port is free again (2 s, or 60 s if the backend closed first, and up to 10 s more). A service with addresses of both families may have so many in each. CPUs that see packets at once may let in one more each. While no daemon runs to remove what is over, nothing is bounded." min:"1" max:"16000000" example:"10000"`
	TCPMSS               config.Number               `json:"tcp_mss,omitempty" unit:"bytes" doc:"The largest TCP segment that clients and backends may send: what their SYNs say is brought down to it, for paths whose MTU is smaller than they know. Without it: what they say. With dsr-* the backends' SYNs do not come by, so it bounds only what backends send." min:"536" max:"65495" example:"1400"`
	TableSize            tableSize                   `json:"table_size,omitempty" unit:"slots" doc:"Size of the service's Maglev table. Without it: 4093 up to 40 backends, 16381 up to 163, 65521 up to 655, 131071 beyond, for each address family by its own backends." example:"4093"`
	Backends             config.List[backendEntry]   `json:"backends" doc:"The servers. Both families may be mixed: a frontend uses backends of its own family. With dsr-*, a service whose backends are all of one family serves frontends of both with them; otherwise a frontend needs a backend of its own family." example:"[{address: 10.0.0.2, port: 8080}]"`
	Health               healthEntry                 `json:"health,omitempty" doc:"How the service's backends are checked: one of tcp, http, https, grpc, udp and exec, and how often. Without it, here and under defaults, backends count as up. Not with dsr-* yet." example:"{http: {path: /healthz, port: 8080}, interval: 2s, timeout: 1s, fall: 3, rise: 2}"`
	Pool                 config.Later                `json:"pool,omitempty" doc:"Backends shared by services." instead:"write the backends in each service; a YAML anchor (x-servers: &servers) lets services share them"`
	ProxyProtocol        config.Later                `json:"proxy_protocol,omitempty" doc:"The client's address, told to the backend." instead:"use nat-destination or dsr-*, where backends see the client's own address"`
	Scheduler            config.Later                `json:"scheduler,omitempty" doc:"Another way to choose backends." instead:"give the backends weights, by which Maglev hashing spreads new flows"`
	Balance              config.Later                `json:"balance,omitempty" doc:"Another way to choose backends." instead:"give the backends weights, by which Maglev hashing spreads new flows"`
	Timeouts             config.Later                `json:"timeouts,omitempty" doc:"Timeouts per service." instead:"set timeouts at the top of the file, for all services"`
}

// backendEntry is one of a service's backends.
type backendEntry struct {
	config.Mark   `json:"-"`
	Address       config.Address `json:"address" doc:"The server's address." example:"10.0.0.2"`
	Port          config.Number  `json:"port,omitempty" doc:"The server's port. Without it packets keep the port they came for. With dsr-* a port that differs from the service's is an error, because packets arrive as clients sent them." min:"1" max:"65535" example:"8080"`
	Weight        config.Number  `json:"weight,omitempty" doc:"The server's share of new flows, relative to the service's other backends. 0: no new flows." min:"0" max:"65535" default:"1" example:"3"`
	Backup        config.Boolean `json:"backup,omitempty" doc:"Whether the server takes new flows only while no other of the service's can: all others of its family are down, wait for their first successful check, or have weight 0. Flows that it has then go on." default:"false" example:"true"`
	Name          config.Text    `json:"name,omitempty" doc:"What output calls the backend, and what its slots depend on: a server that takes over another's name takes over its slots, and no other flow moves. Without it: its address and port." min:"1" max:"63" example:"green"`
	DNS           config.Later   `json:"dns,omitempty" doc:"A name that is looked up." instead:"write address, once for each address of the name"`
	ProxyProtocol config.Later   `json:"proxy_protocol,omitempty" doc:"The client's address, told to the backend." instead:"use nat-destination or dsr-*, where backends see the client's own address"`
}

// healthEntry is health, of a service or the defaults.
type healthEntry struct {
	config.Mark `json:"-"`
	Enabled     config.Boolean  `json:"enabled,omitempty" doc:"Whether backends are checked. false is for a service that is not to have what defaults.health says: its backends count as up." default:"true" example:"false"`
	TCP         tcpCheckEntry   `json:"tcp,omitempty" doc:"A backend is well if it accepts a TCP connection, which is then reset." example:"{}"`
	HTTP        httpCheckEntry  `json:"http,omitempty" doc:"It is well if it answers an HTTP request as expected. Redirects are not followed." example:"{path: /healthz, port: 8080}"`
	HTTPS       httpsCheckEntry `json:"https,omitempty" doc:"The same over TLS." example:"{path: /healthz, port: 8443, server_name: www.example.com}"`
	GRPC        grpcCheckEntry  `json:"grpc,omitempty" doc:"It is well if its grpc.health.v1 service says SERVING. Without TLS." example:"{service: shop.v1.Cart}"`
	UDP         udpCheckEntry   `json:"udp,omitempty" doc:"It is well if it answers a datagram." example:"{send: ping, expect: pong}"`
	Exec        execCheckEntry  `json:"exec,omitempty" doc:"It is well if a program on this machine ends with exit code 0. The program is run as the daemon is, finds SHUNT_SERVICE, SHUNT_BACKEND (the name), SHUNT_ADDRESS and SHUNT_PORT in its environment, and is killed at the timeout with all that it has started. The first line of what it writes is shown when it fails. At most 64 run at once." example:"{command: [/usr/local/bin/check-backend, --fast]}"`
	Interval    config.Duration `json:"interval,omitempty" doc:"From one check of a backend to the next." min:"100ms" max:"1h" default:"2s" example:"5s"`
	Timeout     config.Duration `json:"timeout,omitempty" doc:"How long one check may take, at most interval. Without it: 1s, or interval where that is less." min:"10ms" max:"1h" example:"500ms"`
	Fall        config.Number   `json:"fall,omitempty" unit:"checks" doc:"How many checks in a row must fail for a backend to be down. Then it takes no new flows. Established TCP connections stay with it until they end; unfinished ones and UDP flows go to another backend at once, if no other service has it up." min:"1" max:"100" default:"3" example:"5"`
	Rise        config.Number   `json:"rise,omitempty" unit:"checks" doc:"How many in a row must succeed for a backend that is down to be up again. A new backend needs one. A backend that goes down four times within about a minute stays down for one to three minutes, whatever the checks say: a backend that flaps changes the table about once a minute." min:"1" max:"100" default:"2" example:"5"`
	Jitter      config.Percent  `json:"jitter,omitempty" doc:"By how much intervals differ, either way, so that checks of many balancers do not meet." min:"0" max:"50" default:"5%" example:"10%"`
	SlowStart   config.Duration `json:"slow_start,omitempty" doc:"How long a backend takes to its full weight, in ten steps, when it was down or joins a service that others serve. Without it: no time." min:"1s" max:"1h" example:"30s"`
	Panic       config.Percent  `json:"panic,omitempty" doc:"When fewer than this part of a service's backends are up (backups and those with weight 0 aside, and for each family apart) and no backup is, the checks are not believed: all of them take flows. Without it, or with 0%: never." min:"0" max:"100" example:"30%"`
}

// tcpCheckEntry is health.tcp.
type tcpCheckEntry struct {
	config.Mark `json:"-"`
	Port        config.Number `json:"port,omitempty" doc:"The port that is checked. Without it: the backend's, or else the service's if it has only one." min:"1" max:"65535" example:"8080"`
}

// httpCheckEntry is health.http.
type httpCheckEntry struct {
	config.Mark `json:"-"`
	Port        config.Number         `json:"port,omitempty" doc:"The port that is checked. Without it: the backend's, or else the service's if it has only one." min:"1" max:"65535" example:"8080"`
	Path        config.Text           `json:"path,omitempty" doc:"What is asked for, with the query." min:"1" max:"1024" default:"/" example:"/healthz"`
	Host        config.Text           `json:"host,omitempty" doc:"The Host header. Without it: the address and port." min:"1" max:"255" example:"www.example.com"`
	Status      config.Many[statuses] `json:"status,omitempty" doc:"The statuses that are expected." default:"200-399" example:"[200, 204, \"301-302\"]"`
	Body        config.Phrase         `json:"body,omitempty" doc:"What has to be in the first 64 KiB of the answer. Without it: anything." min:"1" max:"1024" example:"ready"`
}

// httpsCheckEntry is health.https.
type httpsCheckEntry struct {
	config.Mark `json:"-"`
	Port        config.Number         `json:"port,omitempty" doc:"The port that is checked. Without it: the backend's, or else the service's if it has only one." min:"1" max:"65535" example:"8443"`
	Path        config.Text           `json:"path,omitempty" doc:"What is asked for, with the query." min:"1" max:"1024" default:"/" example:"/healthz"`
	Host        config.Text           `json:"host,omitempty" doc:"The Host header. Without it: the address and port." min:"1" max:"255" example:"www.example.com"`
	Status      config.Many[statuses] `json:"status,omitempty" doc:"The statuses that are expected." default:"200-399" example:"[200, 204, \"301-302\"]"`
	Body        config.Phrase         `json:"body,omitempty" doc:"What has to be in the first 64 KiB of the answer. Without it: anything." min:"1" max:"1024" example:"ready"`
	ServerName  config.Text           `json:"server_name,omitempty" doc:"The name that is asked for (SNI) and that the certificate must have. Without it: the name in host; without that, none is asked for, and the certificate must have the backend's address." min:"1" max:"255" example:"www.example.com"`
	Verify      config.Boolean        `json:"verify,omitempty" doc:"Whether the certificate must be right." default:"true" example:"false"`
	CAFile      config.Text           `json:"ca_file,omitempty" doc:"A file with the authorities, as PEM, that the certificate may be from. It is read at start and with each reload. Without it: those of this machine." min:"1" max:"4095" example:"/etc/shunt/backends-ca.pem"`
}

// grpcCheckEntry is health.grpc.
type grpcCheckEntry struct {
	config.Mark `json:"-"`
	Port        config.Number `json:"port,omitempty" doc:"The port that is checked. Without it: the backend's, or else the service's if it has only one." min:"1" max:"65535" example:"9000"`
	Service     config.Text   `json:"service,omitempty" doc:"The gRPC service that is asked about. Without it: the server as a whole." min:"1" max:"255" example:"shop.v1.Cart"`
}

// udpCheckEntry is health.udp.
type udpCheckEntry struct {
	config.Mark `json:"-"`
	Port        config.Number `json:"port,omitempty" doc:"The port that is checked. Without it: the backend's, or else the service's if it has only one." min:"1" max:"65535" example:"53"`
	Send        octets        `json:"send" doc:"What is sent: text, or hex: and hexadecimal digits." min:"1" max:"1024" example:"\"hex:1234 0100 0001 0000 0000 0000 00 0006 0001\""`
	Expect      octets        `json:"expect,omitempty" doc:"What has to be in the answer, written like send. Without it: any answer is one." min:"1" max:"1024" example:"\"hex:1234\""`
}

// execCheckEntry is health.exec.
type execCheckEntry struct {
	config.Mark `json:"-"`
	Command     config.Many[config.Phrase] `json:"command" doc:"The program, with its whole path, and its arguments. No shell reads them." min:"1" max:"4095" example:"[/usr/local/bin/check-backend, --fast]"`
}

// timeoutsEntry is timeouts.
type timeoutsEntry struct {
	config.Mark    `json:"-"`
	TCPEstablished config.Duration `json:"tcp_established,omitempty" doc:"Established TCP connections. RFC 5382 REQ-5 asks for 2h4m or more." default:"2h4m" example:"4h"`
	TCPHandshake   config.Duration `json:"tcp_handshake,omitempty" doc:"TCP connections that are being opened." default:"10s" example:"5s"`
	TCPClosing     config.Duration `json:"tcp_closing,omitempty" doc:"TCP connections after a reset." default:"10s" example:"30s"`
	UDP            config.Duration `json:"udp,omitempty" doc:"UDP flows. RFC 4787 REQ-5 asks for 2m or more and recommends 5m." default:"5m" example:"2m"`
	Settle         config.Duration `json:"settle,omitempty" doc:"How long after a change of the backends flows of dsr-* and of affinity are remembered. A flow that sends nothing for longer than that after a change may be lost." min:"1s" max:"576h" default:"15m" example:"30m"`
}

// limitsEntry is limits.
type limitsEntry struct {
	config.Mark `json:"-"`
	Flows       config.Number `json:"flows,omitempty" unit:"flows" doc:"Established flows tracked at once. Flows in handshake have a quarter as many of their own." min:"1000" max:"16000000" default:"250000" example:"1000000"`
	Services    config.Number `json:"services,omitempty" unit:"services" doc:"Services. One with addresses of both families counts twice. The room for frontends grows with it." min:"1" max:"65535" default:"1000" example:"100"`
	Backends    config.Number `json:"backends,omitempty" unit:"backends" doc:"Different backends of all services together." min:"1" max:"1048575" default:"4096" example:"100000"`
	Slots       config.Number `json:"slots,omitempty" unit:"slots" doc:"Maglev slots, 8 bytes each. A service needs twice its table size for each address family, because a new table is built beside the old one." min:"502" max:"67108864" default:"4194304" example:"16777216"`
	Remembered  config.Number `json:"remembered,omitempty" unit:"entries" doc:"Flows of dsr-* and clients of affinity that are remembered at once. Memory is taken as they come." min:"1000" max:"16000000" default:"250000" example:"1000000"`
	Filters     config.Number `json:"filters,omitempty" unit:"prefixes" doc:"Prefixes of allow_from and deny_from of all services together. There is room for twice as many, because new ones are written beside the old. Memory is taken as they come." min:"1" max:"1000000" default:"10000" example:"50000"`
}

// snatEntry is snat.
type snatEntry struct {
	config.Mark `json:"-"`
	Addresses   config.Many[config.Address] `json:"addresses,omitempty" doc:"Source addresses towards the backends. Without them: the addresses of the interface towards the backend." example:"[10.0.0.1, \"2001:db8:1::1\"]"`
	Ports       config.PortRange            `json:"ports,omitempty" doc:"Source ports towards the backends. Without it: ports outside net.ipv4.ip_local_port_range." example:"1024-32767"`
}

// encapsulationEntry is encapsulation.
type encapsulationEntry struct {
	config.Mark `json:"-"`
	Source      config.Many[config.Network] `json:"source,omitempty" doc:"Outer source address, at most one per family: an address, or a prefix from which each flow takes one by its hash. A prefix lets the backend's receive-side scaling spread flows over its CPUs, which dsr-ipip needs because IPIP has no ports. Without it: the address of the interface towards the backend." example:"[10.9.0.0/24, \"2001:db8:9::1\"]"`
	GUEPort     config.Number               `json:"gue_port,omitempty" doc:"UDP destination port of dsr-gue. Source ports vary with the flow." min:"1" max:"65535" default:"6080" example:"6080"`
}

// apiEntry is api.
type apiEntry struct {
	config.Mark `json:"-"`
	Socket      config.Text `json:"socket,omitempty" doc:"Path of the control socket, for root and the group. Beside it is a second one that only tells the state: shunt-read.sock for shunt.sock. --socket and SHUNT_SOCKET take precedence." min:"1" max:"102" default:"/run/shunt/shunt.sock" example:"/run/shunt/shunt.sock"`
	Group       config.Text `json:"group,omitempty" doc:"Members of this group of the machine may use the control socket: reload, drain, override, and read. Without it: root alone." min:"1" max:"63" example:"shunt-admin"`
	ReadGroup   config.Text `json:"read_group,omitempty" doc:"Members of this group may use the socket for reading. Without it: root alone." min:"1" max:"63" example:"shunt"`
}
