package file

import "github.com/shunt-lb/shunt/internal/config"

// The format of the file, once: package config makes the parser, the JSON Schema, the guide and every
// suggestion from these structs and their tags.

// document is the balancer's keys at the top of a file.
type document struct {
	config.Mark   `json:"-"`
	Interfaces    config.List[interfaceEntry] `json:"interfaces" doc:"The network interfaces that shunt attaches to: the interfaces on which packets of clients arrive, and the interfaces that lead to backends." example:"[{name: eth0}]"`
	Services      config.List[serviceEntry]   `json:"services" doc:"The services that shunt balances." example:"[{name: web, address: 192.0.2.10, port: 80, backends: [{address: 10.0.0.2}]}]"`
	Pools         config.List[poolEntry]      `json:"pools,omitempty" doc:"Backends that several services share, and how they are checked." example:"[{name: servers, health: {tcp: {}}, backends: [{address: 10.0.0.2}]}]"`
	Defaults      defaultsEntry               `json:"defaults,omitempty" doc:"Values for services that do not set their own." example:"{forwarding: nat}"`
	Timeouts      timeoutsEntry               `json:"timeouts,omitempty" doc:"How long a flow may be idle before it ends, counted from the last packet in either direction." example:"{udp: 2m}"`
	Limits        limitsEntry                 `json:"limits,omitempty" doc:"Sizes of the maps. They are fixed when the data plane is first loaded. 'shunt check' prints how much memory they need." example:"{flows: 1000000}"`
	SNAT          snatEntry                   `json:"snat,omitempty" doc:"The source addresses and ports that full NAT uses." example:"{addresses: [10.0.0.1]}"`
	Encapsulation encapsulationEntry          `json:"encapsulation,omitempty" doc:"The contents of the outer headers of dsr-ipip and dsr-gue." example:"{source: 10.0.0.1}"`
	Decapsulation decapsulationEntry          `json:"decapsulation,omitempty" doc:"For a machine that is itself a backend of its services with dsr-*: shunt decapsulates packets that other balancers send to this machine's servers, and gives lo the VIPs without announcing them, as 'shunt decap' does on a machine without a balancer. Where no backend has an address of this machine, the key has no effect, so all machines can have the same file." example:"{from: [10.0.0.0/24]}"`
	Sockets       socketsEntry                `json:"sockets,omitempty" doc:"Programs on this machine whose connections to VIPs go straight to a backend: shunt gives their sockets the backend's address, and changes no packet." example:"{cgroup: /sys/fs/cgroup}"`
	StampProbes   config.Boolean              `json:"stamp_probes,omitempty" doc:"Whether shunt records when it received each probe of 'shunt diag ping' and what it did with the probe, so that 'shunt diag ping -s' on this machine can tell the client. While it is set, each packet that comes in runs 30 to 50 instructions more, and a probe about 100." default:"false" example:"true"`
	BGP           config.Later                `json:"bgp,omitempty" doc:"Sessions with routers." instead:"write announce: none, and announce the VIPs with a routing daemon such as BIRD or FRR"`
}

// interfaceEntry is one of interfaces.
type interfaceEntry struct {
	config.Mark `json:"-"`
	Name        config.Text `json:"name" doc:"The interface's name on this machine. With attach: tc also a pattern, in which * stands for any characters and ? for one. A pattern means the interfaces of this machine's pods: veths that lead into another network namespace and are at no bridge, also those that appear later." min:"1" max:"15" example:"eth0"`
	Attach      config.Word `json:"attach,omitempty" doc:"How shunt attaches to the interface: native is XDP in the driver. generic is XDP in the kernel's stack, which is slower. auto tries native first and says which of the two it got. tc is the kernel's traffic control (tcx, or clsact before Linux 6.6). A VLAN's interface has native only if its parent is in the list with native as well; auto makes it generic. It also serves connections from this machine to its VIPs, and backends on this machine." enum:"auto|native|generic|tc" default:"auto" example:"native"`
}

// defaultsEntry is defaults.
type defaultsEntry struct {
	config.Mark `json:"-"`
	Forwarding  config.Word  `json:"forwarding,omitempty" doc:"How packets reach a backend." enum:"nat|nat-destination|dsr-l2|dsr-ipip|dsr-gue" default:"nat" example:"nat-destination"`
	Announce    config.Word  `json:"announce,omitempty" doc:"How the network learns where a VIP is." enum:"l2|none" later:"bgp: write none, and announce the VIPs with a routing daemon such as BIRD or FRR" default:"l2" example:"none"`
	Health      healthEntry  `json:"health,omitempty" doc:"How backends are checked. Each key that a service sets in its own health takes precedence over the same key here. If the service sets one of tcp, http, https, grpc, udp and exec, that one replaces the one here." example:"{tcp: {}, interval: 5s}"`
	Timeouts    config.Later `json:"timeouts,omitempty" doc:"Timeouts per service." instead:"set timeouts at the top of the file, for all services"`
}

// serviceEntry is one of services.
type serviceEntry struct {
	config.Mark          `json:"-"`
	Name                 config.Text                 `json:"name" doc:"The service's name. It must be unique. The placement of flows depends on it: with direct return or affinity, a service that is renamed or merged into another one places its flows anew. With NAT alone it keeps them." min:"1" max:"63" example:"web"`
	Address              config.Many[config.Address] `json:"address" doc:"The VIPs: the addresses that clients connect to. Every combination of address, port and protocol is a frontend of the service." example:"[192.0.2.10, \"2001:db8::10\"]"`
	Port                 config.Many[config.Ports]   `json:"port" doc:"A port, a range, or any. An exact port takes precedence over a range, and a range over any. Every other overlap is an error." example:"[80, 443, \"8000-8099\"]"`
	Protocol             config.Many[config.Word]    `json:"protocol,omitempty" doc:"The transport protocol." enum:"tcp|udp" later:"sctp: leave the service out: packets of protocols other than TCP and UDP pass to the host|quic: write udp: QUIC is balanced like any UDP (a client that changes its address may reach another backend)" default:"tcp" example:"[tcp, udp]"`
	Forwarding           config.Word                 `json:"forwarding,omitempty" doc:"How packets reach a backend: nat rewrites source and destination, and works wherever the backends are. nat-destination rewrites the destination only, and this machine must be the backends' route back to the clients. With dsr-* (direct server return) the backend has the VIP itself and answers the client directly. dsr-l2 changes the MAC addresses only, for backends on the same link. dsr-ipip adds an outer IP header, and dsr-gue adds an outer IP header and a UDP header (GUE). Both work for backends anywhere." enum:"nat|nat-destination|dsr-l2|dsr-ipip|dsr-gue" inherits:"defaults.forwarding" example:"nat-destination"`
	Tracking             config.Word                 `json:"tracking,omitempty" doc:"Which flows are remembered with dsr-* or affinity: auto remembers the flows that a change of the backends would move otherwise. always remembers every flow from its first packet. none remembers no flow, so a change of the backends moves flows. The key has no effect under nat without affinity, because nat remembers every flow." enum:"auto|always|none" default:"auto" example:"always"`
	Affinity             config.Word                 `json:"affinity,omitempty" doc:"Whether a client stays with one backend: with client-ip all flows from one client address go to one backend." enum:"none|client-ip" default:"none" example:"client-ip"`
	AffinityTimeout      config.Duration             `json:"affinity_timeout,omitempty" doc:"How long a client stays with its backend after its last packet, if the backends have changed in the meantime. Only with affinity." min:"1s" max:"12h" default:"3h" example:"30m"`
	Hash                 config.Word                 `json:"hash,omitempty" doc:"What decides a flow's slot in the table: with flow, addresses and ports decide, so a client's flows are spread. With addresses, only the client's address and the VIP decide. Only the first fragment of a packet has ports. With addresses and dsr-* the later fragments reach the right backend through any of several balancers, even if they arrive before the first fragment, while the slot is not changing. A change of this key moves flows." enum:"flow|addresses" later:"least-connections: give the backends weights: Maglev hashing spreads new flows according to them" default:"flow" example:"addresses"`
	Announce             config.Word                 `json:"announce,omitempty" doc:"How the network learns where the VIPs are: l2 answers ARP and neighbour solicitations for them. none leaves them to routing." enum:"l2|none" later:"bgp: write none, and announce the VIPs with a routing daemon such as BIRD or FRR" inherits:"defaults.announce" example:"none"`
	OnDown               config.Word                 `json:"on_down,omitempty" doc:"What happens to the flows of a backend that goes down: keep leaves established TCP connections with it until they end, and moves all others. close ends them at once, too: their clients' next packets are answered with a reset, by another backend or by shunt, and so are the backend's. Use it where connections to a server that is down do harm: a database that is no longer the primary." enum:"keep|close" default:"keep" example:"close"`
	OnNoBackend          config.Word                 `json:"on_no_backend,omitempty" doc:"What happens to a packet while no backend takes new flows (the service has no backend, or all have weight 0 or are drained): reject answers at once, TCP with a reset and UDP with an ICMP 'port unreachable'. drop sends no answer, and the client waits in vain. The packet is counted in both cases. Flows that a backend still has go on." enum:"reject|drop" default:"reject" example:"drop"`
	AllowFrom            config.Many[config.Prefix]  `json:"allow_from,omitempty" doc:"Source addresses that may use the service. If this list has an entry, an address that is in neither list may not use the service. If an address is in several prefixes of both lists, the longest prefix decides. A client that may not use the service gets no answer. Under nat the lists are checked when a flow begins, so flows from before a change go on. With dsr-* they are checked for every packet: this costs one look-up per packet, and a change ends flows at once. Ping is always answered." example:"[198.51.100.0/24, \"2001:db8:9::/48\"]"`
	DenyFrom             config.Many[config.Prefix]  `json:"deny_from,omitempty" doc:"Source addresses that may not use the service: exceptions to allow_from. If allow_from is empty, all other addresses may use the service." example:"[203.0.113.0/24]"`
	MaxNewFlowsPerSource config.Rate                 `json:"max_new_flows_per_source,omitempty" doc:"How many flows each source address may begin per second. For IPv6 the limit applies to each /64. Without it: no limit. The flows of one second may come at once. Packets beyond the limit are dropped. With dsr-* the limit counts TCP SYNs, including retransmissions, and cannot be used for udp. shunt remembers 65536 source addresses. In a flood from more, it forgets the address that was unseen for the longest time, and this address may begin a full second's flows again." min:"1" max:"1000000" example:"100/s"`
	MaxFlows             config.Number               `json:"max_flows,omitempty" unit:"flows" doc:"How many flows the service may have at once, under nat and nat-destination. A packet that would begin one flow more is dropped. Without it: as many as limits.flows has room for. The limit counts flows that began after it was set: established flows, flows in handshake, and closed flows until their port is free again (2 s, or 60 s if the backend closed first, and up to 10 s more). A service with addresses of both families may have this many flows in each family. CPUs that see packets at the same moment may each let in one flow more. The limit has no effect while no daemon runs, because nothing then removes the flows that have ended." min:"1" max:"16000000" example:"10000"`
	TCPMSS               config.Number               `json:"tcp_mss,omitempty" unit:"bytes" doc:"The largest TCP segment that clients and backends may send, for paths with a smaller MTU than they know. shunt lowers the MSS in their SYNs to this value. Without it: the MSS is not changed. With dsr-* shunt does not see the backends' SYNs, so the value limits only what backends send." min:"536" max:"65495" example:"1400"`
	TableSize            tableSize                   `json:"table_size,omitempty" unit:"slots" doc:"Size of the service's Maglev table. Without it: 4093 up to 40 backends, 16381 up to 163, 65521 up to 655, 131071 beyond. Each address family counts its own backends." example:"4093"`
	Pool                 config.Text                 `json:"pool,omitempty" doc:"The pool of the service's backends and their health checks. A service has either pool or backends." min:"1" max:"63" example:"servers"`
	Backends             config.List[backendEntry]   `json:"backends,omitempty" doc:"The servers. Without it: the backends of pool. A service may have backends of both families: a frontend uses backends of its own family. With dsr-*, if all backends of a service are of one family, they serve frontends of both families. Otherwise a frontend needs a backend of its own family." example:"[{address: 10.0.0.2, port: 8080}]"`
	Health               healthEntry                 `json:"health,omitempty" doc:"How the service's backends are checked: one of tcp, http, https, grpc, udp and exec, and how often. If health is set neither here nor under defaults, backends count as up. With dsr-* a check goes to the VIP, on the path that clients' packets take." example:"{http: {path: /healthz, port: 8080}, interval: 2s, timeout: 1s, fall: 3, rise: 2}"`
	ProxyProtocol        config.Later                `json:"proxy_protocol,omitempty" doc:"The client's address, told to the backend." instead:"use nat-destination or dsr-*, where backends see the client's own address"`
	Scheduler            config.Later                `json:"scheduler,omitempty" doc:"Another way to choose backends." instead:"give the backends weights: Maglev hashing spreads new flows according to them"`
	Balance              config.Later                `json:"balance,omitempty" doc:"Another way to choose backends." instead:"give the backends weights: Maglev hashing spreads new flows according to them"`
	Algorithm            config.Later                `json:"algorithm,omitempty" doc:"Another way to choose backends." instead:"give the backends weights: Maglev hashing spreads new flows according to them"`
	LeastConnections     config.Later                `json:"least_connections,omitempty" doc:"Another way to choose backends." instead:"give the backends weights: Maglev hashing spreads new flows according to them"`
	SYNProtection        config.Later                `json:"syn_protection,omitempty" doc:"SYN cookies for the backends." instead:"bound each source with max_new_flows_per_source, and let the backends use SYN cookies: net.ipv4.tcp_syncookies"`
	QUIC                 config.Later                `json:"quic,omitempty" doc:"Flows by QUIC's connection IDs." instead:"write protocol: udp: QUIC is balanced like any UDP (a client that changes its address may reach another backend)"`
	Timeouts             config.Later                `json:"timeouts,omitempty" doc:"Timeouts per service." instead:"set timeouts at the top of the file, for all services"`
}

// poolEntry is one of pools.
type poolEntry struct {
	config.Mark `json:"-"`
	Name        config.Text               `json:"name" doc:"The pool's name. It must be unique." min:"1" max:"63" example:"servers"`
	Backends    config.List[backendEntry] `json:"backends" doc:"The servers, as in a service." example:"[{address: 10.0.0.2, port: 8080}]"`
	Health      healthEntry               `json:"health,omitempty" doc:"How the backends are checked. A backend is checked once for all services of the pool, or once for each port, if the backend and the check have no port and the services have different ones. With dsr-* it is checked once for each VIP." example:"{tcp: {}}"`
}

// backendEntry is one of a service's backends.
type backendEntry struct {
	config.Mark   `json:"-"`
	Address       config.Address `json:"address,omitempty" doc:"The server's address. A backend has either address or dns." instead:"write the IP address, or the name as dns instead of address" example:"10.0.0.2"`
	DNS           config.Text    `json:"dns,omitempty" doc:"A domain name, instead of address: each address that the DNS has for it is a server (A records for the IPv4 addresses of the service, AAAA records for the IPv6 addresses; both with dsr-*). shunt asks the resolvers in /etc/resolv.conf, with its search list unless the name ends with a dot, and asks again when the TTL has passed. /etc/hosts is not read." min:"1" max:"254" example:"web.example.org"`
	Max           config.Number  `json:"max,omitempty" unit:"addresses" doc:"With dns: the most addresses of each family that are used, in the order of the addresses." min:"1" max:"1024" default:"16" example:"64"`
	Port          config.Number  `json:"port,omitempty" doc:"The server's port. Without it: packets keep the port that the client connected to. With dsr-* a port that differs from the service's port is an error, because packets arrive as clients sent them." min:"1" max:"65535" example:"8080"`
	Weight        config.Number  `json:"weight,omitempty" doc:"The server's share of new flows, relative to the service's other backends. 0 means no new flows." min:"0" max:"65535" default:"1" example:"3"`
	Backup        config.Boolean `json:"backup,omitempty" doc:"Whether the server takes new flows only while no other backend of the service can: all others of its family are down, wait for their first successful check, or have weight 0. When another backend can take new flows again, flows that the backup has go on." default:"false" example:"true"`
	Health        checkAtEntry   `json:"health,omitempty" doc:"Where the health checks of this server go, if not to its own address (with dsr-*: the VIP) and the port of the service's health. The service's health says how the server is checked." example:"{port: 9000}"`
	Name          config.Text    `json:"name,omitempty" doc:"The backend's name in output. The backend's slots depend on it: a server that takes over the name of another server takes over its slots, and no other flow moves. Without it: the backend's address and port." min:"1" max:"63" example:"green"`
	ProxyProtocol config.Later   `json:"proxy_protocol,omitempty" doc:"The client's address, told to the backend." instead:"use nat-destination or dsr-*, where backends see the client's own address"`
}

// checkAtEntry is health of a backend.
type checkAtEntry struct {
	config.Mark `json:"-"`
	Address     config.Address `json:"address,omitempty" doc:"The address that is checked. Without it: the backend's, or the VIP with dsr-*." example:"10.9.0.2"`
	Port        config.Number  `json:"port,omitempty" doc:"The port that is checked. Without it: the port of the service's health. If that has none either, the backend's port, and if the backend has no port, the service's port, if the service has only one." min:"1" max:"65535" example:"9000"`
}

// healthEntry is health, of a service or the defaults.
type healthEntry struct {
	config.Mark `json:"-"`
	Enabled     config.Boolean  `json:"enabled,omitempty" doc:"Whether backends are checked. Set false for a service that must not use defaults.health: its backends then count as up." default:"true" example:"false"`
	TCP         tcpCheckEntry   `json:"tcp,omitempty" doc:"The check succeeds if the backend accepts a TCP connection. shunt then resets the connection." example:"{}"`
	HTTP        httpCheckEntry  `json:"http,omitempty" doc:"The check succeeds if the backend answers an HTTP request as expected. Redirects are not followed." example:"{path: /healthz, port: 8080}"`
	HTTPS       httpsCheckEntry `json:"https,omitempty" doc:"The same as http, over TLS." example:"{path: /healthz, port: 8443, server_name: www.example.com}"`
	GRPC        grpcCheckEntry  `json:"grpc,omitempty" doc:"The check succeeds if the backend's grpc.health.v1 service says SERVING. TLS is not used." example:"{service: shop.v1.Cart}"`
	UDP         udpCheckEntry   `json:"udp,omitempty" doc:"The check succeeds if the backend answers a datagram." example:"{send: ping, expect: pong}"`
	Exec        execCheckEntry  `json:"exec,omitempty" doc:"The check succeeds if a program on this machine ends with exit code 0. The program runs with the daemon's rights. It finds SHUNT_SERVICE or, in a pool, SHUNT_POOL, and SHUNT_BACKEND (the name), SHUNT_ADDRESS and SHUNT_PORT in its environment. At the timeout it is killed, with all processes that it has started. If it fails, shunt shows the first line of its output. At most 64 programs run at once." example:"{command: [/usr/local/bin/check-backend, --fast]}"`
	Interval    config.Duration `json:"interval,omitempty" doc:"The time from one check of a backend to the next." min:"100ms" max:"1h" default:"2s" example:"5s"`
	Timeout     config.Duration `json:"timeout,omitempty" doc:"How long one check may take, at most interval. Without it: 1s, or interval if that is less." min:"10ms" max:"1h" example:"500ms"`
	Fall        config.Number   `json:"fall,omitempty" unit:"checks" doc:"How many checks in a row must fail for a backend to be down. A backend that is down takes no new flows. Established TCP connections stay with it until they end. TCP connections that it has not answered, and UDP flows, go to another backend at once, unless the backend is up in another service." min:"1" max:"100" default:"3" example:"5"`
	Rise        config.Number   `json:"rise,omitempty" unit:"checks" doc:"How many checks in a row must succeed for a backend that is down to be up again. A new backend needs one successful check. A backend that goes down four times within about a minute stays down for one to three minutes, whatever the checks say. So a backend that flaps changes the table only about once a minute." min:"1" max:"100" default:"2" example:"5"`
	Jitter      config.Percent  `json:"jitter,omitempty" doc:"By how much intervals vary, up or down, so that many balancers do not check at the same moment." min:"0" max:"50" default:"5%" example:"10%"`
	SlowStart   config.Duration `json:"slow_start,omitempty" doc:"How long a backend takes to reach its full weight, in ten steps, after it was down or when it joins a service that others serve. Without it: it has its full weight at once." min:"1s" max:"1h" example:"30s"`
	Panic       config.Percent  `json:"panic,omitempty" doc:"If fewer than this part of a service's backends are up, and no backup is up, the checks are not believed: all these backends take flows. Backups and backends with weight 0 are not among them, and each family counts separately. Without it, or with 0%: the checks are always believed." min:"0" max:"100" example:"30%"`
}

// tcpCheckEntry is health.tcp.
type tcpCheckEntry struct {
	config.Mark `json:"-"`
	Port        config.Number `json:"port,omitempty" doc:"The port that is checked. Without it: the backend's port. If the backend has no port, the service's port, if the service has only one." min:"1" max:"65535" example:"8080"`
}

// httpCheckEntry is health.http.
type httpCheckEntry struct {
	config.Mark `json:"-"`
	Port        config.Number         `json:"port,omitempty" doc:"The port that is checked. Without it: the backend's port. If the backend has no port, the service's port, if the service has only one." min:"1" max:"65535" example:"8080"`
	Path        config.Text           `json:"path,omitempty" doc:"The path of the request, with the query." min:"1" max:"1024" default:"/" example:"/healthz"`
	Host        config.Text           `json:"host,omitempty" doc:"The Host header. Without it: the address and port." min:"1" max:"255" example:"www.example.com"`
	Status      config.Many[statuses] `json:"status,omitempty" doc:"The expected statuses." default:"200-399" example:"[200, 204, \"301-302\"]"`
	Body        config.Phrase         `json:"body,omitempty" doc:"Text that must be in the first 64 KiB of the answer. Without it: any answer will do." min:"1" max:"1024" example:"ready"`
}

// httpsCheckEntry is health.https.
type httpsCheckEntry struct {
	config.Mark `json:"-"`
	Port        config.Number         `json:"port,omitempty" doc:"The port that is checked. Without it: the backend's port. If the backend has no port, the service's port, if the service has only one." min:"1" max:"65535" example:"8443"`
	Path        config.Text           `json:"path,omitempty" doc:"The path of the request, with the query." min:"1" max:"1024" default:"/" example:"/healthz"`
	Host        config.Text           `json:"host,omitempty" doc:"The Host header. Without it: the address and port." min:"1" max:"255" example:"www.example.com"`
	Status      config.Many[statuses] `json:"status,omitempty" doc:"The expected statuses." default:"200-399" example:"[200, 204, \"301-302\"]"`
	Body        config.Phrase         `json:"body,omitempty" doc:"Text that must be in the first 64 KiB of the answer. Without it: any answer will do." min:"1" max:"1024" example:"ready"`
	ServerName  config.Text           `json:"server_name,omitempty" doc:"The name that the check asks for (SNI) and that the certificate must have. Without it: the name in host. If host has no name either, the check asks for no name, and the certificate must have the backend's address." min:"1" max:"255" example:"www.example.com"`
	Verify      config.Boolean        `json:"verify,omitempty" doc:"Whether the certificate must be valid." default:"true" example:"false"`
	CAFile      config.Text           `json:"ca_file,omitempty" doc:"A PEM file with the certificate authorities that the check trusts. It is read at start and at each reload. Without it: the certificate authorities of this machine." min:"1" max:"4095" example:"/etc/shunt/backends-ca.pem"`
}

// grpcCheckEntry is health.grpc.
type grpcCheckEntry struct {
	config.Mark `json:"-"`
	Port        config.Number `json:"port,omitempty" doc:"The port that is checked. Without it: the backend's port. If the backend has no port, the service's port, if the service has only one." min:"1" max:"65535" example:"9000"`
	Service     config.Text   `json:"service,omitempty" doc:"The gRPC service whose health is asked for. Without it: the server as a whole." min:"1" max:"255" example:"shop.v1.Cart"`
}

// udpCheckEntry is health.udp.
type udpCheckEntry struct {
	config.Mark `json:"-"`
	Port        config.Number `json:"port,omitempty" doc:"The port that is checked. Without it: the backend's port. If the backend has no port, the service's port, if the service has only one." min:"1" max:"65535" example:"53"`
	Send        octets        `json:"send" doc:"The datagram that is sent: text, or hex: followed by hexadecimal digits." min:"1" max:"1024" example:"\"hex:1234 0100 0001 0000 0000 0000 00 0006 0001\""`
	Expect      octets        `json:"expect,omitempty" doc:"What the answer must contain, written like send. Without it: any answer will do." min:"1" max:"1024" example:"\"hex:1234\""`
	Silence     config.Word   `json:"silence,omitempty" doc:"What no answer means: with fail the check fails. With pass it succeeds, and fails only if the datagram is refused (an ICMP error, such as that of a closed port) or an answer is not the expected one. Use it for servers that answer nothing that is not their own, such as syslog or WireGuard. A machine that is gone, or a path that drops packets, looks like a server that is silent." enum:"fail|pass" default:"fail" example:"pass"`
}

// execCheckEntry is health.exec.
type execCheckEntry struct {
	config.Mark `json:"-"`
	Command     config.Many[config.Phrase] `json:"command" doc:"The program, with its full path, and its arguments. No shell interprets them." min:"1" max:"4095" example:"[/usr/local/bin/check-backend, --fast]"`
}

// timeoutsEntry is timeouts.
type timeoutsEntry struct {
	config.Mark    `json:"-"`
	TCPEstablished config.Duration `json:"tcp_established,omitempty" doc:"For established TCP connections. RFC 5382 REQ-5 asks for 2h4m or more." default:"2h4m" example:"4h"`
	TCPHandshake   config.Duration `json:"tcp_handshake,omitempty" doc:"For TCP connections in handshake." default:"10s" example:"5s"`
	TCPClosing     config.Duration `json:"tcp_closing,omitempty" doc:"For TCP connections after a reset." default:"10s" example:"30s"`
	TCPHalfClosed  config.Duration `json:"tcp_half_closed,omitempty" doc:"For TCP connections that one side has closed and the other has not. RFC 5382 REQ-5 asks for 4m or more. At most tcp_established, which applies if it is shorter than the default." default:"4m" example:"1h"`
	UDP            config.Duration `json:"udp,omitempty" doc:"For UDP flows. RFC 4787 REQ-5 asks for 2m or more and recommends 5m." default:"5m" example:"2m"`
	Settle         config.Duration `json:"settle,omitempty" doc:"For how long after a change of the backends shunt remembers flows of services with dsr-* or affinity. A flow that sends nothing for longer than this after a change may be lost." min:"1s" max:"576h" default:"15m" example:"30m"`
}

// limitsEntry is limits.
type limitsEntry struct {
	config.Mark `json:"-"`
	Flows       config.Number `json:"flows,omitempty" unit:"flows" doc:"The number of established flows tracked at once. Flows in handshake have a map of their own, a quarter of this size." min:"1000" max:"16000000" default:"250000" example:"1000000"`
	Services    config.Number `json:"services,omitempty" unit:"services" doc:"The number of services. A service with addresses of both families counts twice. The room for frontends grows with this number." min:"1" max:"65535" default:"1000" example:"100"`
	Backends    config.Number `json:"backends,omitempty" unit:"backends" doc:"The number of different backends of all services together." min:"1" max:"1048575" default:"4096" example:"100000"`
	Slots       config.Number `json:"slots,omitempty" unit:"slots" doc:"The number of Maglev slots, 8 bytes each. A service needs twice its table size for each address family, because a new table is built beside the old one." min:"502" max:"67108864" default:"4194304" example:"16777216"`
	Remembered  config.Number `json:"remembered,omitempty" unit:"entries" doc:"How many flows of dsr-*, and clients of services with affinity, are remembered at once. Memory is allocated only as entries are added." min:"1000" max:"16000000" default:"250000" example:"1000000"`
	Filters     config.Number `json:"filters,omitempty" unit:"prefixes" doc:"The number of prefixes in allow_from and deny_from of all services together. There is room for twice as many, because new prefixes are written beside the old ones. Memory is allocated only as prefixes are added." min:"1" max:"1000000" default:"10000" example:"50000"`
}

// snatEntry is snat.
type snatEntry struct {
	config.Mark `json:"-"`
	Addresses   config.Many[config.Address] `json:"addresses,omitempty" doc:"Source addresses of packets to the backends. Without it: the address that this machine would use towards the backend (ip route get). A flow keeps its source as long as this machine has the address." example:"[10.0.0.1, \"2001:db8:1::1\"]"`
	Ports       config.PortRange            `json:"ports,omitempty" doc:"Source ports of packets to the backends. Without it: ports outside net.ipv4.ip_local_port_range." example:"1024-32767"`
}

// decapsulationEntry is decapsulation.
type decapsulationEntry struct {
	config.Mark `json:"-"`
	From        config.Many[config.Network] `json:"from" doc:"The permitted senders: addresses or prefixes from which other balancers send encapsulated packets. An encapsulated packet to a VIP from any other sender is dropped." example:"[10.0.0.0/24, \"2001:db8:2::/64\"]"`
}

// socketsEntry is sockets.
type socketsEntry struct {
	config.Mark `json:"-"`
	Cgroup      config.Text `json:"cgroup" doc:"The folder of a cgroup2 file system. The sockets of all processes in this cgroup, and in those below it, are served. /sys/fs/cgroup covers the whole machine." min:"1" max:"4096" example:"/sys/fs/cgroup"`
}

// encapsulationEntry is encapsulation.
type encapsulationEntry struct {
	config.Mark `json:"-"`
	Source      config.Many[config.Network] `json:"source,omitempty" doc:"The outer source address, at most one entry per family: an address, or a prefix. With a prefix, each flow takes an address from it by its hash. A prefix lets the backend's receive-side scaling spread flows over its CPUs. dsr-ipip needs this because IPIP has no ports. Without it: the address of the interface towards the backend, or else of this machine, on lo first." example:"[10.9.0.0/24, \"2001:db8:9::1\"]"`
	GUEPort     config.Number               `json:"gue_port,omitempty" doc:"The UDP destination port of dsr-gue. The source port depends on the flow." min:"1" max:"65535" default:"6080" example:"6080"`
}
