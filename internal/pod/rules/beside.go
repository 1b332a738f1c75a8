package rules

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// beside is a part of the kernel, other than netfilter's rules, that acts on forwarded packets.
type beside struct {
	balances bool // IPVS has a service
	policies []policy
}

// policy is an IPsec policy that acts: packets are dropped, or have to be encrypted.
type policy struct {
	from, to netip.Prefix
	dir      netlink.Dir
}

// judge returns a hazard if the packets, or answers that look like them, could be concerned.
func (b *beside) judge(p Packets) *Hazard {
	if b.balances {
		// The conntrack entry of a packet that IPVS balances does not say that it is translated: ip_vs_update_conntrack (net/netfilter/ipvs/ip_vs_nfct.c)
		// changes only the addresses of its answers. With net.ipv4.vs.conntrack=0 there is no entry at all.
		return &Hazard{Chain: "IPVS", What: "it has services, whose answers shunt cannot tell from other packets"}
	}
	for _, one := range b.policies {
		if overlaps(one.from, p.From, p.FromBits) && overlaps(one.to, p.To, p.ToBits) {
			return &Hazard{Chain: "IPsec", What: fmt.Sprintf("the policy (%s) from %s to %s", one.dir, one.from, one.to)}
		}
	}
	return nil
}

// overlaps reports whether a network has any of the addresses. Only the first bits of these are known; 0: all.
func overlaps(network netip.Prefix, addresses []netip.Addr, bits int) bool {
	return slices.ContainsFunc(addresses, func(a netip.Addr) bool {
		known := a.BitLen()
		if bits > 0 {
			known = bits
		}
		return network.Overlaps(netip.PrefixFrom(a, known))
	})
}

// readBeside asks the kernel.
func readBeside() (b beside, err error) {
	if b.balances, err = hasServices("/proc/thread-self/net/ip_vs"); err != nil {
		return b, fmt.Errorf("read the services of IPVS: %w", err)
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all, err := netlink.XfrmPolicyList(family)
		if errors.Is(err, unix.EPROTONOSUPPORT) { // no IPsec in this kernel, for any family; asking has it look for a module
			break
		}
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // a dump that was interrupted is read again soon
			return b, fmt.Errorf("read the policies of IPsec: %w", err)
		}
		for i := range all {
			if one, does := policyOf(&all[i], family); does {
				b.policies = append(b.policies, one)
			}
		}
	}
	return b, nil
}

// policyOf returns the effect of a policy on forwarded packets, if it has one: policies of sockets and of IPsec's interfaces concern other
// packets, and a policy that allows without a template lets packets pass unchanged.
func policyOf(p *netlink.XfrmPolicy, family int) (one policy, does bool) {
	one = policy{from: prefixOf(p.Src, family), to: prefixOf(p.Dst, family), dir: p.Dir}
	forwarded := p.Dir == netlink.XFRM_DIR_OUT || p.Dir == netlink.XFRM_DIR_FWD
	return one, forwarded && p.Ifid == 0 && (p.Action == netlink.XFRM_POLICY_BLOCK || len(p.Tmpls) > 0)
}

// prefixOf returns a selector's network; all of the family if it has none.
func prefixOf(network *net.IPNet, family int) netip.Prefix {
	all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if family == netlink.FAMILY_V6 {
		all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	if network == nil {
		return all
	}
	a, ok := netip.AddrFromSlice(network.IP)
	bits, width := network.Mask.Size()
	if a = a.Unmap(); !ok || a.BitLen() != all.Addr().BitLen() || bits > a.BitLen() || width == 0 {
		return all
	}
	return netip.PrefixFrom(a, bits)
}

// hasServices reports whether a list of IPVS has more than its title of three lines (ip_vs_info_seq_show). Without IPVS there is no list.
func hasServices(path string) (bool, error) {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close() //nolint:errcheck // only read
	const title = 3
	lines := bufio.NewScanner(file)
	for range title + 1 {
		if !lines.Scan() {
			return false, lines.Err()
		}
	}
	return true, nil
}
