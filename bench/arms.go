package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/bench/macswap"
)

// The ports: servers listen on one, virtual services on the other.
const (
	serverPort  = 8080
	servicePort = 80
)

// arm is one way from the client to the servers.
type arm struct {
	name     string
	what     string // one line for the report
	programs []bed.Program
	target   netip.AddrPort
	// start puts the arm in place; the returned function removes it.
	start func(ctx context.Context, r *run) (stop func() error, alive []*bed.Child, err error)
	// incremental is set where the arm cannot complete checksums that the sender left to
	// hardware: it is measured only with checksum offload off.
	incremental bool
	tcpOnly     bool // the arm has no UDP
}

// arms are all candidates, in the order of the report.
var arms = []arm{
	{
		name: "direct", what: "one veth from client to servers, nothing between",
		target: netip.AddrPortFrom(bed.DirectServer, serverPort), start: startNothing,
	},
	{
		name: "routed", what: "the kernel of the balancer's namespace routes",
		target: netip.AddrPortFrom(bed.ServerOne, serverPort), start: startNothing,
	},
	{
		name: "macswap", what: "an XDP program that only writes new MAC addresses and redirects (bench/bpf/macswap.bpf.c)",
		target: netip.AddrPortFrom(bed.ServerOne, serverPort), start: startMACSwap, incremental: true,
	},
	{
		name: "shunt", what: "shunt run, forwarding: nat, two backends",
		target: netip.AddrPortFrom(bed.VIP, servicePort), start: startShunt,
	},
	{
		name: "haproxy", what: "HAProxy in TCP mode, round robin over two servers",
		programs: []bed.Program{{Name: "haproxy", Package: "haproxy"}},
		target:   netip.AddrPortFrom(bed.ClientGateway, servicePort), start: startHAProxy, tcpOnly: true,
	},
	{
		name: "nftables", what: "nftables DNAT by hash to two servers, with masquerade",
		programs: []bed.Program{{Name: "nft", Package: "nftables"}},
		target:   netip.AddrPortFrom(bed.VIP, servicePort), start: startNFTables,
	},
}

func startNothing(context.Context, *run) (func() error, []*bed.Child, error) {
	return func() error { return nil }, nil, nil
}

// startMACSwap attaches one copy of the program per direction; with one arm, one for both.
func startMACSwap(_ context.Context, r *run) (func() error, []*bed.Child, error) {
	var stops []func() error
	stop := func() error {
		var errs []error
		for _, one := range stops {
			errs = append(errs, one())
		}
		return errors.Join(errs...)
	}
	in, out := r.bed.ToClients().Name, r.bed.ToServers().Name
	toServers, toClient := macswap.Hop{Destination: r.bed.ServerMAC, Source: r.bed.ToServers().MAC}, macswap.Hop{Destination: r.bed.ClientMAC, Source: r.bed.ToClients().MAC}
	ways := []macswap.Way{{In: in, Out: out, Hop: toServers, Back: toClient}}
	if in != out {
		ways = append(ways, macswap.Way{In: out, Out: in, Hop: toClient})
	}
	for _, way := range ways {
		one, err := way.Attach(r.bed.Host(bed.Balancer))
		if err != nil {
			return nil, nil, errors.Join(err, stop())
		}
		stops = append(stops, one)
	}
	return stop, nil, nil
}

// startShunt runs the real program with a real file, as its users do.
func startShunt(_ context.Context, r *run) (func() error, []*bed.Child, error) {
	config := filepath.Join(r.dir, "shunt.yaml")
	interfaces := ""
	for _, i := range r.bed.Host(bed.Balancer).Interfaces() {
		interfaces += fmt.Sprintf("  - name: %s\n", i.Name)
	}
	text := fmt.Sprintf(`interfaces:
%sservices:
  - name: web
    address: %s
    port: %d
    protocol: tcp
    forwarding: nat
    announce: none
    backends:
      - {address: %s, port: %d}
      - {address: %s, port: %d}
  - name: bulk
    address: %s
    port: %d
    protocol: [tcp, udp]
    forwarding: nat
    announce: none
    backends:
      - {address: %s}
api: {socket: %s}
`, interfaces, bed.VIP, servicePort,
		bed.ServerOne, serverPort, bed.ServerTwo, serverPort,
		bed.VIP, bulkPort, bed.ServerOne, filepath.Join(r.dir, "shunt.sock"))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, nil, err
	}
	child, err := r.bed.Start(bed.Balancer, r.shunt, append([]string{"run", "--instance", "bench", "--config", config}, r.shuntArgs...)...)
	if err != nil {
		return nil, nil, err
	}
	return child.Stop, []*bed.Child{child}, nil
}

func startHAProxy(_ context.Context, r *run) (func() error, []*bed.Child, error) {
	config := filepath.Join(r.dir, "haproxy.cfg")
	text := fmt.Sprintf(`global
    maxconn 4000
defaults
    mode tcp
    timeout connect 5s
    timeout client 60s
    timeout server 60s
listen web
    bind %s:%d
    balance roundrobin
    server one %s:%d
    server two %s:%d
listen bulk
    bind %s:%d
    balance roundrobin
    server one %s:%d
`, bed.ClientGateway, servicePort, bed.ServerOne, serverPort, bed.ServerTwo, serverPort,
		bed.ClientGateway, bulkPort, bed.ServerOne, bulkPort)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, nil, err
	}
	child, err := r.bed.Start(bed.Balancer, "haproxy", "-db", "-f", config)
	if err != nil {
		return nil, nil, err
	}
	return child.Stop, []*bed.Child{child}, nil
}

func startNFTables(ctx context.Context, r *run) (func() error, []*bed.Child, error) {
	rules := fmt.Sprintf(`table ip shunt_bench {
	chain pre {
		type nat hook prerouting priority dstnat;
		ip daddr %[1]s tcp dport %[2]d dnat to jhash ip saddr . tcp sport mod 2 map { 0 : %[3]s, 1 : %[4]s } : %[5]d
		ip daddr %[1]s meta l4proto { tcp, udp } th dport %[6]d dnat to %[3]s
	}
	chain post {
		type nat hook postrouting priority srcnat;
		oifname %[7]s ip daddr { %[3]s, %[4]s } masquerade
	}
}
`, bed.VIP, servicePort, bed.ServerOne, bed.ServerTwo, serverPort, bulkPort, r.bed.ToServers().Name)
	if _, err := r.bed.RunInput(ctx, bed.Balancer, rules, "nft", "-f", "-"); err != nil {
		return nil, nil, err
	}
	stop := func() error {
		// Not the run's context: the table must go after Ctrl-C too.
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, err := r.bed.Run(ctx, bed.Balancer, "nft", "delete", "table", "ip", "shunt_bench")
		return err
	}
	return stop, nil, nil
}

// startServers runs nginx with one worker per server address. Both workers listen on all
// addresses (reuseport), so every arm has the same server capacity behind it, also those
// that send everything to one address.
func startServers(r *run) (*bed.Child, error) {
	config := filepath.Join(r.dir, "nginx.conf")
	server := bed.Nginx{Workers: 2, Listen: fmt.Sprintf("%d reuseport", serverPort), Answer: "ok",
		PID: filepath.Join(r.dir, "nginx.pid"), ErrorLog: filepath.Join(r.dir, "nginx.log"), Folder: r.dir}
	if err := os.WriteFile(config, []byte(server.Config()), 0o600); err != nil {
		return nil, err
	}
	return r.bed.Start(bed.Servers, "nginx", "-c", config, "-e", server.ErrorLog)
}
