package net

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/lab"
)

// contestedFile has one service, with one backend, at both VIPs.
func (b *bed) contestedFile(iface string) string {
	return fmt.Sprintf("defaults: {forwarding: nat, announce: l2}\nlimits: {flows: 10000}\ninterfaces:\n  - {name: %s, attach: generic}\nservices:\n  - name: web\n    address: [%s, %q]\n    port: 80\n    backends:\n%s",
		iface, lab.VIP4, lab.VIP6, b.backends([]int{1}, 8080))
}

// standby is a second balancer on the balancer's segment, with the same services.
type standby struct {
	*bed
	host *lab.Host
	file string
	name string // its instance's
	sock string
	run  *process
}

func (b *bed) addStandby(t *testing.T) *standby {
	t.Helper()
	host, err := b.AddHost("lb2")
	if err != nil {
		t.Fatal(err)
	}
	prefix := netip.MustParsePrefix
	if err := b.ConnectPort(lab.End{Host: host, Interface: "eth0", IPv4: prefix("10.0.0.99/24"), IPv6: prefix("2001:db8:1::99/64")}, b.Switch, "br0", lab.Cable{}); err != nil {
		t.Fatal(err)
	}
	if err := b.Ready(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	s := &standby{bed: b, host: host, file: filepath.Join(folder, "shunt.yaml"), name: b.instance + "-2", sock: filepath.Join(folder, "shunt.sock")}
	b.replaceFile(s.file, b.contestedFile("eth0"))
	t.Cleanup(func() {
		s.stop()
		if code, out := s.ask("detach", "--instance", s.name); code != 0 && !strings.Contains(out, "nothing of it is on this machine") {
			t.Errorf("shunt detach: exit code %d\n%s", code, out)
		}
	})
	return s
}

func (s *standby) start() {
	s.run = s.spawn(s.host, "run", "--config", s.file, "--instance", s.name, "--socket", s.sock)
	s.awaits(s.run, "msg=running")
}

func (s *standby) stop() {
	if s.run == nil {
		return
	}
	if err := s.run.end(syscall.SIGTERM); err != nil {
		s.t.Errorf("the second shunt: %v", err)
	}
	if s.t.Failed() {
		s.t.Logf("the log of the second shunt:\n%s", s.run.log())
	}
	s.run = nil
}

func (s *standby) ask(args ...string) (code int, out string) {
	text, err := command(s.host, args...).CombinedOutput()
	if err != nil {
		code = 1
	}
	return code, string(text)
}

// said counts the conditions with a code in `shunt status`.
func (s *standby) said(code string) (n int, out string) {
	_, out = s.ask("status", "--instance", s.name, "--socket", s.sock)
	return strings.Count(out, code), out
}

// answerers returns the hardware addresses that answer the client's look-ups of an address.
func (b *bed) answerers(t *testing.T, vip netip.Addr) string {
	t.Helper()
	found := map[string]bool{}
	for range 6 {
		b.forget(t)
		_ = b.tryUDP(at(vip, 53)) // to cause a look-up
		if mac := b.resolved(t, vip); mac != "" {
			found[mac] = true
		}
	}
	return fmt.Sprint(found)
}

func (b *bed) isolate(t *testing.T, on bool, ports ...string) {
	t.Helper()
	for _, port := range ports {
		link, err := b.Switch.Netlink().LinkByName(port)
		if err == nil {
			err = b.Switch.Netlink().LinkSetIsolated(link, on)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestTwoOwnersMeet: two instances claim an address while they do not see each other. Once they do, the one with the
// lower hardware address keeps it, the other stops answering, and both report the conflict; and when the one that
// keeps it dies, the other takes over within seconds.
func TestTwoOwnersMeet(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, VIPOnLink: true, Backends: 1})
	s := b.addStandby(t)
	if err := s.host.SetMAC("eth0", net.HardwareAddr{2, 0, 0, 0, 0xee, 1}); err != nil { // higher than any of the lab's
		t.Fatal(err)
	}
	b.isolate(t, true, "lb", "lb2")
	b.write(b.contestedFile("eth0"))
	b.start()
	s.start()
	keeps := b.Balancer.Interfaces()[0].MAC.String()
	owned := `msg="answering for address"`
	eventually(t, 20*time.Second, "both claim both addresses", func() error {
		if one, two := strings.Count(b.daemon.log(), owned), strings.Count(s.run.log(), owned); one < 2 || two < 2 {
			return fmt.Errorf("they claimed %d and %d", one, two)
		}
		return nil
	})
	began := time.Now()
	b.isolate(t, false, "lb", "lb2")
	eventually(t, 60*time.Second, "the second one says that the first has the addresses", func() error {
		if n, out := s.said("address_in_use"); n != 2 {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	t.Logf("one of two yields %s after they can see each other", time.Since(began).Round(100*time.Millisecond))
	b.logged(t, "condition=address_contested", 2)
	for _, vip := range vips {
		if got := b.answerers(t, vip); got != fmt.Sprintf("map[%s:true]", keeps) {
			t.Errorf("%s is answered for by %s, want %s alone", vip, got, keeps)
		}
		if _, err := b.get(b.Client.HTTPClient(false), at(vip, 80)); err != nil {
			t.Error(err)
		}
	}
	began = time.Now()
	if err := b.Balancer.SetUp("eth0", false); err != nil {
		t.Fatal(err)
	}
	eventually(t, 60*time.Second, "the second one follows", func() error {
		if n, out := s.said("address_in_use"); n != 0 {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	t.Logf("a balancer that is gone is followed after %s", time.Since(began).Round(100*time.Millisecond))
	for _, vip := range vips {
		if _, err := b.get(b.Client.HTTPClient(false), at(vip, 80)); err != nil {
			t.Error(err)
		}
	}
}

// TestAddressGivenToAHostByHand: a host without shunt gets an address that shunt has claimed. shunt keeps it, wins
// its clients back, and reports the hardware address that answers, too.
func TestAddressGivenToAHostByHand(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, VIPOnLink: true, Backends: 2})
	b.write(b.contestedFile("eth0"))
	b.start()
	for _, vip := range vips {
		if _, err := b.get(b.Client.HTTPClient(false), at(vip, 80)); err != nil {
			t.Fatal(err)
		}
	}
	other, ours := b.Backends[1], b.Balancer.Interfaces()[0].MAC.String()
	for _, vip := range vips {
		if err := other.AddAddress("eth0", netip.PrefixFrom(vip, vip.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	mac := other.Interfaces()[0].MAC.String()
	eventually(t, 60*time.Second, "condition address_contested for both addresses", func() error {
		_, out := b.shunt("status", "--instance", b.instance, "--socket", b.socket)
		if strings.Count(out, "address_contested") != 2 || !strings.Contains(out, mac) {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	for _, vip := range vips { // as if the other host had announced it
		link, err := b.Client.Netlink().LinkByName("eth0")
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Client.Netlink().NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: vip.AsSlice(), State: netlink.NUD_REACHABLE, HardwareAddr: other.Interfaces()[0].MAC}); err != nil {
			t.Fatal(err)
		}
	}
	for _, vip := range vips {
		eventually(t, 60*time.Second, "the client hears where "+vip.String()+" is", func() error {
			if got := b.resolved(t, vip); got != ours {
				return fmt.Errorf("it has %s", got)
			}
			return nil
		})
	}
}
