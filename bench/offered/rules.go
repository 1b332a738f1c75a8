package main

// kubeProxyIPTables are the rules of kube-proxy 1.34 for one Service with a node port, policy Cluster and one endpoint
// on another node. Pods have addresses of 10.244.0.0/16. The names of chains end in a hash there.
const kubeProxyIPTables = `*filter
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-FIREWALL - [0:0]
-A INPUT -m conntrack --ctstate NEW -m comment --comment "load balancer firewall" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "health check ports" -j KUBE-NODEPORTS
-A INPUT -m conntrack --ctstate NEW -m comment --comment "external portals" -j KUBE-EXTERNAL-SERVICES
-A INPUT -j KUBE-FIREWALL
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "load balancer firewall" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "forwarding" -j KUBE-FORWARD
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "portals" -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "external portals" -j KUBE-EXTERNAL-SERVICES
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "load balancer firewall" -j KUBE-PROXY-FIREWALL
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "portals" -j KUBE-SERVICES
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "loopback from outside" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "forwarding" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "forwarding, conntrack" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SVC-OFFERED - [0:0]
:KUBE-EXT-OFFERED - [0:0]
:KUBE-SEP-OFFERED - [0:0]
-A PREROUTING -m comment --comment "portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "postrouting" -j KUBE-POSTROUTING
-A KUBE-SERVICES -m comment --comment "offered, cluster IP" -m udp -p udp -d CLUSTERIP --dport CLUSTERPORT -j KUBE-SVC-OFFERED
-A KUBE-SERVICES -m comment --comment "node ports" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -m comment --comment "offered" -m udp -p udp --dport NODEPORT -j KUBE-EXT-OFFERED
-A KUBE-EXT-OFFERED -m comment --comment "offered, from outside" -j KUBE-MARK-MASQ
-A KUBE-EXT-OFFERED -j KUBE-SVC-OFFERED
-A KUBE-SVC-OFFERED -m comment --comment "offered, cluster IP" -m udp -p udp ! -s 10.244.0.0/16 -d CLUSTERIP --dport CLUSTERPORT -j KUBE-MARK-MASQ
-A KUBE-SVC-OFFERED -m comment --comment "offered" -j KUBE-SEP-OFFERED
-A KUBE-SEP-OFFERED -m comment --comment "offered" -s BACKEND -j KUBE-MARK-MASQ
-A KUBE-SEP-OFFERED -m comment --comment "offered" -m udp -p udp -j DNAT --to-destination ENDPOINT
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -m comment --comment "source NAT" -j MASQUERADE --random-fully
COMMIT
`

// kubeProxyIPVS are the rules of kube-proxy 1.34 beside IPVS, without the rules that ask sets of ipset, some
// look-ups for each packet: a bit less work than in a cluster.
const kubeProxyIPVS = `*filter
:KUBE-FORWARD - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
-A INPUT -m comment --comment "IPVS" -j KUBE-IPVS-FILTER
-A INPUT -m comment --comment "access rules" -j KUBE-PROXY-FIREWALL
-A INPUT -m comment --comment "health check ports" -j KUBE-NODE-PORT
-A FORWARD -m comment --comment "access rules" -j KUBE-PROXY-FIREWALL
-A FORWARD -m comment --comment "forwarding" -j KUBE-FORWARD
-A KUBE-FORWARD -m comment --comment "forwarding" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "forwarding, conntrack" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A PREROUTING -m comment --comment "portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "postrouting" -j KUBE-POSTROUTING
-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-NODE-PORT -p udp -m comment --comment "node port" -m udp --dport NODEPORT -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -m comment --comment "source NAT" -j MASQUERADE --random-fully
COMMIT
`

// kubeProxyNFTables are the rules of kube-proxy 1.34 in mode nftables for the same Service.
const kubeProxyNFTables = `table ip kube-proxy {
	set cluster-ips { type ipv4_addr; elements = { CLUSTERIP }; }
	set nodeport-ips { type ipv4_addr; elements = { NODEIP }; }
	map firewall-ips { type ipv4_addr . inet_proto . inet_service : verdict; }
	map no-endpoint-services { type ipv4_addr . inet_proto . inet_service : verdict; }
	map no-endpoint-nodeports { type inet_proto . inet_service : verdict; }
	map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; elements = { CLUSTERIP . udp . CLUSTERPORT : goto service-offered }; }
	map service-nodeports { type inet_proto . inet_service : verdict; elements = { udp . NODEPORT : goto external-offered }; }

	chain filter-prerouting-pre-dnat { type filter hook prerouting priority -110; ct state new jump firewall-check; }
	chain filter-output-pre-dnat { type filter hook output priority -110; ct state new jump firewall-check; }
	chain filter-forward { type filter hook forward priority 0; ct state new jump service-endpoints-check; ct state new jump cluster-ips-check; }
	chain filter-input { type filter hook input priority 0; ct state new jump nodeport-endpoints-check; ct state new jump service-endpoints-check; }
	chain filter-output { type filter hook output priority 0; ct state new jump service-endpoints-check; ct state new jump cluster-ips-check; }
	chain nat-prerouting { type nat hook prerouting priority -100; jump services; }
	chain nat-output { type nat hook output priority -100; jump services; }
	chain nat-postrouting { type nat hook postrouting priority 100; jump masquerading; }

	chain firewall-check { ip daddr . meta l4proto . th dport vmap @firewall-ips; }
	chain nodeport-endpoints-check { ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports; }
	chain service-endpoints-check { ip daddr . meta l4proto . th dport vmap @no-endpoint-services; }
	chain cluster-ips-check { ip daddr @cluster-ips reject; }
	chain services {
		ip daddr . meta l4proto . th dport vmap @service-ips
		ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
	}
	chain mark-for-masquerade { meta mark set meta mark or 0x4000; }
	chain masquerading {
		meta mark and 0x4000 == 0 return
		meta mark set meta mark xor 0x4000
		masquerade fully-random
	}
	chain external-offered { jump mark-for-masquerade; goto service-offered; }
	chain service-offered {
		ip daddr CLUSTERIP udp dport CLUSTERPORT ip saddr != 10.244.0.0/16 jump mark-for-masquerade
		numgen random mod 1 vmap { 0 : goto endpoint-offered }
	}
	chain endpoint-offered {
		ip saddr BACKEND jump mark-for-masquerade
		meta l4proto udp dnat to ENDPOINT
	}
}
`
