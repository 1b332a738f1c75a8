package rules

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestServicesOfAList(t *testing.T) {
	title := "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n"
	for text, want := range map[string]bool{"": false, title: false, title + "TCP  0A600001:01BB rr\n": true, title + "FWM  00000001 rr\n  -> 0AF40101:1F90      Masq    1      0          0\n": true} {
		path := filepath.Join(t.TempDir(), "ip_vs")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if has, err := hasServices(path); has != want || err != nil {
			t.Errorf("%q has a service: %v, %v; want %v", text, has, err, want)
		}
	}
	if has, err := hasServices(filepath.Join(t.TempDir(), "none")); has || err != nil {
		t.Errorf("without a list: %v, %v", has, err)
	}
	if _, err := hasServices(t.TempDir()); err == nil {
		t.Error("a list that cannot be read has no service")
	}
}

// A policy counts if it does something to forwarded packets, and then for the packets that its selector
// could match.
func TestPolicies(t *testing.T) {
	network := func(text string) *net.IPNet {
		if text == "" {
			return nil
		}
		_, n, err := net.ParseCIDR(text)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	encrypted := []netlink.XfrmPolicyTmpl{{Proto: netlink.XFRM_PROTO_ESP}}
	for _, c := range []struct {
		what      string
		src, dst  string
		policy    netlink.XfrmPolicy
		family    int
		from, to  string
		concerned bool
	}{
		{"encrypts between networks", "10.244.1.0/24", "10.244.2.0/24", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_OUT, Tmpls: encrypted}, netlink.FAMILY_V4, "10.244.1.1/32", "10.244.2.0/24", true},
		{"the other way", "10.244.1.0/24", "10.244.2.0/24", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_OUT, Tmpls: encrypted}, netlink.FAMILY_V4, "10.244.2.1/32", "10.244.1.0/24", false},
		{"a part of a network", "10.244.1.0/24", "10.244.2.9/32", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_FWD, Tmpls: encrypted}, netlink.FAMILY_V4, "10.244.1.1/32", "10.244.2.0/24", true},
		{"a network around", "10.0.0.0/8", "", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_OUT, Tmpls: encrypted}, netlink.FAMILY_V4, "10.244.1.1/32", "10.244.2.0/24", true},
		{"blocks all", "", "", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_FWD, Action: netlink.XFRM_POLICY_BLOCK}, netlink.FAMILY_V6, "2001:db8::1/128", "2001:db8::2/128", true},
		{"blocks all of the other family", "", "", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_FWD, Action: netlink.XFRM_POLICY_BLOCK}, netlink.FAMILY_V6, "10.244.1.1/32", "10.244.1.2/32", false},
		{"elsewhere", "192.0.2.0/24", "198.51.100.0/24", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_OUT, Tmpls: encrypted}, netlink.FAMILY_V4, "10.244.1.1/32", "10.244.2.0/24", false},
		{"for the host itself", "", "", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_IN, Tmpls: encrypted}, netlink.FAMILY_V4, "10.244.1.1/32", "10.244.1.2/32", false},
		{"of a socket", "", "", netlink.XfrmPolicy{Dir: netlink.XFRM_SOCKET_OUT, Tmpls: encrypted}, netlink.FAMILY_V4, "10.244.1.1/32", "10.244.1.2/32", false},
		{"of an interface of IPsec", "", "", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_OUT, Ifid: 7, Tmpls: encrypted}, netlink.FAMILY_V4, "10.244.1.1/32", "10.244.1.2/32", false},
		{"allows as it is", "", "", netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_OUT}, netlink.FAMILY_V4, "10.244.1.1/32", "10.244.1.2/32", false},
	} {
		c.policy.Src, c.policy.Dst = network(c.src), network(c.dst)
		s := Set{}
		if one, does := policyOf(&c.policy, c.family); does {
			s.beside.policies = append(s.beside.policies, one)
		}
		from, to := netip.MustParsePrefix(c.from), netip.MustParsePrefix(c.to)
		h := s.Find(Packets{From: []netip.Addr{from.Addr()}, FromBits: from.Bits(), To: []netip.Addr{to.Addr()}, ToBits: to.Bits(), Established: true})
		if (h != nil) != c.concerned || h != nil && !strings.HasPrefix(h.String(), "IPsec: the policy (dir ") {
			t.Errorf("%s: from %s to %s: %v, want %v", c.what, c.from, c.to, h, c.concerned)
		}
	}
}
