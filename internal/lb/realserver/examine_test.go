package realserver

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

var (
	vip4 = netip.MustParseAddr("192.0.2.10")
	vip6 = netip.MustParseAddr("2001:db8::10")
)

// healthy returns a server without faults in any mode.
func healthy() Facts {
	address := netip.MustParseAddr
	return Facts{
		Links: []Link{
			{Name: "lo", Up: true, NoARP: true, MTU: 65536, Addresses: []netip.Addr{address("127.0.0.1"), vip4, vip6}},
			{Name: "eth0", Up: true, MTU: 1600, Addresses: []netip.Addr{address("10.0.0.20"), address("2001:db8:2::20"), address("fe80::1")}},
			{Name: "eth1", Up: true, MTU: 1500},
			{Name: "tunl0", Up: true, NoARP: true, MTU: 1480, Tunnel: Tunnel{Outer: 4, Inner4: true}},
			{Name: "ip6tnl0", Up: true, NoARP: true, MTU: 1452, Tunnel: Tunnel{6, true, true}},
		},
		Settings: map[string]Settings{"all": {1, 2, 0}, "eth0": {}, "lo": {}, "tunl0": {}, "ip6tnl0": {}},
		GUE:      []uint16{6080},
		Defaults: []Route{
			{Family: 4, Interface: "eth0", Gateway: address("10.0.0.1")},
			{Family: 6, Interface: "eth0", Gateway: address("fe80::9"), Priority: 1024},
		},
	}
}

func remove[T any](list []T, which func(T) bool) []T {
	return slices.DeleteFunc(slices.Clone(list), which)
}

func (f *Facts) of(name string) *Link {
	for i := range f.Links {
		if f.Links[i].Name == name {
			return &f.Links[i]
		}
	}
	panic(name)
}

// Each fault is found, and is the only one found; its remedy is a command.
func TestExamineFindsEachFault(t *testing.T) {
	for _, c := range []struct {
		name       string
		forwarding model.Forwarding
		spoil      func(*Facts)
		code       string
		subject    string
		remedy     string
		severity   condition.Severity // that of the code if empty
	}{
		{name: "no interface", spoil: func(f *Facts) { f.Links = f.Links[:1] }, code: condition.InterfaceMissing, subject: "eth0", remedy: "ip link show"},
		{name: "down", spoil: func(f *Facts) { f.of("eth0").Up = false }, code: InterfaceDown, subject: "eth0", remedy: "ip link set dev eth0 up"},
		{name: "no VIP4", spoil: func(f *Facts) {
			f.of("lo").Addresses = remove(f.of("lo").Addresses, func(a netip.Addr) bool { return a == vip4 })
		}, code: VIPMissing, subject: "192.0.2.10", remedy: "ip address add 192.0.2.10/32 dev lo scope host"},
		{name: "no VIP6", spoil: func(f *Facts) {
			f.of("lo").Addresses = remove(f.of("lo").Addresses, func(a netip.Addr) bool { return a == vip6 })
		}, code: VIPMissing, subject: "2001:db8::10", remedy: "ip address add 2001:db8::10/128 dev lo preferred_lft 0"},
		{name: "a VIP on Ethernet", spoil: func(f *Facts) { f.of("eth1").Addresses = []netip.Addr{vip6} }, code: VIPVisible, subject: "2001:db8::10",
			remedy: "ip address add 2001:db8::10/128 dev lo preferred_lft 0; ip address del 2001:db8::10/128 dev eth1"},
		{name: "ARP answered", spoil: func(f *Facts) { f.Settings["all"] = Settings{0, 2, 0} }, code: ARPAnswered, subject: "eth0", remedy: "sysctl -w net.ipv4.conf.all.arp_ignore=1"},
		{name: "ARP announced", spoil: func(f *Facts) { f.Settings["all"] = Settings{1, 1, 0} }, code: ARPAnnounced, subject: "eth0", remedy: "sysctl -w net.ipv4.conf.all.arp_announce=2"},
		{name: "strict, and the way out is elsewhere", forwarding: model.ForwardingDSRL2, spoil: func(f *Facts) {
			f.Settings["eth0"] = Settings{0, 0, 1}
			f.Defaults[0].Interface = "eth1"
		}, code: ReversePathStrict, subject: "eth0", remedy: "sysctl -w net.ipv4.conf.eth0.rp_filter=2"},
		{name: "strict, and the way out is the same", forwarding: model.ForwardingDSRL2, spoil: func(f *Facts) { f.Settings["all"] = Settings{1, 2, 1} },
			code: ReversePathStrict, subject: "eth0", remedy: "sysctl -w net.ipv4.conf.eth0.rp_filter=2", severity: condition.Info},
		{name: "a strict tunnel device", forwarding: model.ForwardingDSRIPIP, spoil: func(f *Facts) { f.Settings["tunl0"] = Settings{0, 0, 1} },
			code: ReversePathStrict, subject: "tunl0", remedy: "sysctl -w net.ipv4.conf.tunl0.rp_filter=2"},
		{name: "short MTU, IPv4", forwarding: model.ForwardingDSRIPIP, spoil: func(f *Facts) {
			f.of("eth0").MTU = 1510
			f.Defaults[1].MSS = 1400
		}, code: TunnelMTU, subject: "192.0.2.10", remedy: "ip route change default via 10.0.0.1 dev eth0 advmss 1450; or raise the MTU of eth0, of the balancer, and of all between them to 1520"},
		{name: "short MTU, IPv6", forwarding: model.ForwardingDSRIPIP, spoil: func(f *Facts) { f.of("eth0").MTU = 1520 },
			code: TunnelMTU, subject: "2001:db8::10", remedy: "ip -6 route change default via fe80::9 dev eth0 metric 1024 advmss 1420; or raise the MTU of eth0, of the balancer, and of all between them to 1540"},
		{name: "short MTU, GUE", forwarding: model.ForwardingDSRGUE, spoil: func(f *Facts) { f.of("eth0").MTU = 1540 }, code: TunnelMTU, subject: "2001:db8::10",
			remedy: "ip -6 route change default via fe80::9 dev eth0 metric 1024 advmss 1428; or raise the MTU of eth0, of the balancer, and of all between them to 1552"},
		{name: "no IPIP device", forwarding: model.ForwardingDSRIPIP, spoil: func(f *Facts) { f.Links = remove(f.Links, func(l Link) bool { return l.Name == "tunl0" }) },
			code: TunnelMissing, subject: "192.0.2.10", remedy: "shunt decap --interface eth0 --vip 192.0.2.10 --from BALANCER"},
		{name: "no device for IPv6", forwarding: model.ForwardingDSRIPIP, spoil: func(f *Facts) { f.of("ip6tnl0").Tunnel.Inner6 = false },
			code: TunnelMissing, subject: "2001:db8::10", remedy: "shunt decap --interface eth0 --vip 2001:db8::10 --from BALANCER"},
		{name: "a device that is down", forwarding: model.ForwardingDSRIPIP, spoil: func(f *Facts) { f.of("tunl0").Up = false }, code: TunnelDown, subject: "tunl0", remedy: "ip link set dev tunl0 up"},
		{name: "no default route", spoil: func(f *Facts) { f.Defaults = f.Defaults[:1] }, code: NoDefaultRoute, subject: "IPv6", remedy: "ip -6 route add default via GATEWAY dev eth0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := Want{Interface: "eth0", VIPs: []netip.Addr{vip4, vip6}, Forwarding: c.forwarding, GUEPort: 6080}
			f := healthy()
			if found := Examine(f, want); len(found) != 0 {
				t.Fatalf("a healthy server has %v", found)
			}
			c.spoil(&f)
			found := Examine(f, want)
			if len(found) != 1 {
				t.Fatalf("found %v, want one fault", found)
			}
			d, _ := Lookup(c.code)
			if c.severity == "" {
				c.severity = d.Severity
			}
			got := found[0]
			if got.Code != c.code || got.Subject != c.subject || got.Remedy != c.remedy || got.Severity != c.severity || got.Text == "" {
				t.Errorf("found %+v\nwant code %s, subject %s, severity %s, remedy %s", got, c.code, c.subject, c.severity, c.remedy)
			}
			if Wrong(found) != (c.severity != condition.Info) {
				t.Errorf("Wrong is %v with severity %s", Wrong(found), c.severity)
			}
		})
	}
}

// Settings that differ from the prepared ones, and are not wrong.
func TestExamineIsSilent(t *testing.T) {
	for name, c := range map[string]struct {
		want   Want
		change func(*Facts)
	}{
		"sh_decap in place of devices": {Want{Forwarding: model.ForwardingDSRIPIP}, func(f *Facts) {
			f.Links, f.GUE, f.Decap = f.Links[:3], nil, []string{"eth0"}
		}},
		"no encapsulation": {Want{Forwarding: model.ForwardingDSRL2}, func(f *Facts) {
			f.Links = f.Links[:3]
			f.of("eth0").MTU = 1500
		}},
		"it is not known whether there is encapsulation": {Want{}, func(f *Facts) {
			f.Links = f.Links[:3]
			f.of("eth0").MTU = 1500
		}},
		"the interface's own settings": {Want{}, func(f *Facts) {
			f.Settings["all"], f.Settings["eth0"] = Settings{}, Settings{2, 2, 2}
		}},
		"a VIP on a dummy": {Want{}, func(f *Facts) {
			f.of("lo").Addresses = nil
			f.Links = append(f.Links, Link{Name: "dummy0", Up: true, NoARP: true, Addresses: []netip.Addr{vip4, vip6}})
		}},
		"short segments": {Want{Forwarding: model.ForwardingDSRGUE}, func(f *Facts) {
			f.of("eth0").MTU = 1500
			f.Defaults[0].MSS, f.Defaults[1].MSS = 1428, 1388
		}},
		"IPv6 alone asks nothing of IPv4": {Want{VIPs: []netip.Addr{vip6}}, func(f *Facts) {
			f.Settings["all"] = Settings{0, 0, 1}
			f.Defaults = f.Defaults[1:]
		}},
	} {
		t.Run(name, func(t *testing.T) {
			f := healthy()
			c.change(&f)
			c.want.Interface, c.want.GUEPort = "eth0", 6080
			if c.want.VIPs == nil {
				c.want.VIPs = []netip.Addr{vip4, vip6}
			}
			if found := Examine(f, c.want); len(found) != 0 {
				t.Errorf("found %v", found)
			}
		})
	}
}

// TestTunnelMTU: the figures are for the encapsulations that may come, between the families
// of balancer and backend.
func TestTunnelMTU(t *testing.T) {
	of := func(prefixes ...string) (list []netip.Prefix) {
		for _, p := range prefixes {
			list = append(list, netip.MustParsePrefix(p))
		}
		return list
	}
	for _, c := range []struct {
		name     string
		want     Want
		vip      netip.Addr
		mtu      int
		severity condition.Severity
		text     string // "": nothing is wrong
	}{
		{"both may come", Want{GUEPort: 6080}, vip4, 1500, condition.Warning,
			"become 1520 with dsr-ipip and 1532 with dsr-gue in the tunnel, and the MTU of eth0 is 1500: the MSS of clients must be at most 1440 and 1428"},
		{"IPIP alone", Want{}, vip4, 1500, condition.Warning, "become 1520 with dsr-ipip in the tunnel, and the MTU of eth0 is 1500: the MSS of clients must be at most 1440"},
		{"GUE alone does not fit", Want{GUEPort: 6080}, vip4, 1520, condition.Info, "become 1532 with dsr-gue in the tunnel, and the MTU of eth0 is 1520: the MSS of clients must be at most 1448"},
		{"GUE", Want{GUEPort: 6080, Forwarding: model.ForwardingDSRGUE}, vip4, 1520, condition.Warning, "become 1532 with dsr-gue in the tunnel"},
		{"both fit", Want{GUEPort: 6080}, vip4, 1532, "", ""},
		{"a balancer with IPv6", Want{Senders: of("2001:db8:2::1/128")}, vip4, 1520, condition.Warning, "become 1540 with dsr-ipip in the tunnel"},
		{"an IPv6 VIP, and a balancer with IPv4", Want{Senders: of("10.0.0.0/24")}, vip6, 1520, "", ""},
		{"balancers of both", Want{Senders: of("10.0.0.0/24", "2001:db8:2::/64")}, vip6, 1520, condition.Warning, "become 1540 with dsr-ipip in the tunnel"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := healthy()
			f.Decap, f.of("eth0").MTU = []string{"eth0"}, c.mtu
			c.want.Interface, c.want.VIPs = "eth0", []netip.Addr{c.vip}
			found := Examine(f, c.want)
			if c.text == "" {
				if len(found) != 0 {
					t.Errorf("found %v", found)
				}
				return
			}
			if len(found) != 1 || found[0].Code != TunnelMTU || found[0].Severity != c.severity || !strings.Contains(found[0].Text, c.text) {
				t.Errorf("found %v, want %s: %s", found, c.severity, c.text)
			}
		})
	}
}

// GUE on the kernel's own port: the port is looked at, then the device behind it.
func TestExamineGUEPort(t *testing.T) {
	f := healthy()
	f.GUE = []uint16{6081}
	found := Examine(f, Want{Interface: "eth0", VIPs: []netip.Addr{vip4}, Forwarding: model.ForwardingDSRGUE, GUEPort: 6080})
	if len(found) != 1 || found[0].Code != TunnelMissing || !strings.Contains(found[0].Remedy, "--gue-port 6080") {
		t.Errorf("found %v, want %s", found, TunnelMissing)
	}
}

func TestSettingsWithDots(t *testing.T) {
	if got := setCommand("eth0.5", "rp_filter", 2); got != "sysctl -w net/ipv4/conf/eth0.5/rp_filter=2" {
		t.Errorf("the command is %s", got)
	}
}

func TestCodesAreSortedAndComplete(t *testing.T) {
	if !slices.IsSortedFunc(Codes, func(a, b condition.Definition) int { return strings.Compare(a.Code, b.Code) }) {
		t.Error("Codes are not sorted")
	}
	for _, d := range Codes {
		if d.Severity == "" || d.Subject == "" || d.Meaning == "" || d.Remedy == "" {
			t.Errorf("%s is incomplete: %+v", d.Code, d)
		}
		if _, twice := condition.Lookup(d.Code); twice {
			t.Errorf("%s is a code of the package condition, too", d.Code)
		}
	}
}

// TestExamineFindsAll: each of very many findings has a command of its own.
func TestExamineFindsAll(t *testing.T) {
	want := Want{Interface: "eth0", Forwarding: model.ForwardingDSRL2}
	for i := range 20 {
		want.VIPs = append(want.VIPs, netip.AddrFrom4([4]byte{192, 0, 2, byte(100 + i)}))
	}
	found := Examine(healthy(), want)
	for i, vip := range want.VIPs {
		if i >= len(found) || found[i].Subject != vip.String() || found[i].Remedy != addCommand(vip) {
			t.Fatalf("of %s it found %+v", vip, found[min(i, len(found)):])
		}
	}
}
