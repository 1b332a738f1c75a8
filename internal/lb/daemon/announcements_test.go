package daemon

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// criers is an announcer that records its calls.
type criers struct {
	said  []string
	stuck error // of every withdrawal
}

func (c *criers) Announce(addr netip.Addr, iface int) {
	c.said = append(c.said, fmt.Sprintf("+%s %d", addr, iface))
}

func (c *criers) StandBy(addr netip.Addr, iface int) {
	c.said = append(c.said, fmt.Sprintf("?%s %d", addr, iface))
}

func (c *criers) Withdraw(addr netip.Addr, iface int) error {
	c.said = append(c.said, fmt.Sprintf("-%s %d", addr, iface))
	return c.stuck
}

func (c *criers) Close(bool) error { return nil }

// TestAnnouncements: VIPs with `announce: l2` and NAT sources are announced on the interfaces in whose network
// they are, or on all; addresses of the host itself are not, and no address is announced twice.
func TestAnnouncements(t *testing.T) {
	c := &criers{}
	there := map[string]link{
		"eth0": {1, []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}},
		"eth1": {2, []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24"), netip.MustParsePrefix("2001:db8::1/64")}},
	}
	a := &announcements{announcer: c, vips: map[netip.Addr]int{}, standbys: map[netip.Addr]int{}, interfaces: map[netip.Addr][]int{}, waiting: map[netip.Addr]bool{}, find: func(name string) (link, error) {
		if l, ok := there[name]; ok {
			return l, nil
		}
		return link{}, errors.New("no such interface")
	}}
	config := func(announced string, silent ...string) model.Config {
		var with model.Config
		with.Interfaces = listed("eth0", "eth1", "gone")
		for vip := range strings.FieldsSeq(announced) {
			with.Services = append(with.Services, model.Service{Name: vip, Announce: model.AnnounceL2, Frontends: []model.Frontend{{Address: netip.MustParseAddr(vip)}}})
		}
		for _, vip := range silent {
			with.Services = append(with.Services, model.Service{Name: vip, Announce: model.AnnounceNone, Frontends: []model.Frontend{{Address: netip.MustParseAddr(vip)}}})
		}
		return with
	}
	own := map[netip.Addr]bool{netip.MustParseAddr("192.0.2.1"): true}
	says := func(config model.Config, sources string, want ...string) error {
		t.Helper()
		var from []netip.Addr
		for source := range strings.FieldsSeq(sources) {
			from = append(from, netip.MustParseAddr(source))
		}
		c.said = nil
		err := a.want(config.Interfaces, model.Shared(config.Services), from, own)
		slices.Sort(c.said)
		if !slices.Equal(c.said, want) {
			t.Errorf("it said %q, want %q", c.said, want)
		}
		return err
	}
	all := config("192.0.2.10 203.0.113.5 2001:db8::10 192.0.2.1", "192.0.2.20")
	var told []string
	a.tell = func(networks []netip.Prefix) { told = append(told, fmt.Sprint(networks)) }
	_ = says(all, "10.0.0.9", "+10.0.0.9 2", "+192.0.2.10 1", "+2001:db8::10 2", "+203.0.113.5 1", "+203.0.113.5 2")
	_ = says(all, "10.0.0.9")
	if want := []string{"[192.0.2.0/24 10.0.0.0/24 2001:db8::/64]"}; !slices.Equal(told, want) {
		t.Errorf("the networks are told as %q, want %q", told, want)
	}
	own[netip.MustParseAddr("192.0.2.10")] = true
	_ = says(all, "", "-10.0.0.9 2", "-192.0.2.10 1")
	standby := all
	standby.Services = slices.Clone(all.Services)
	for i, name := range []string{"192.0.2.11", "203.0.113.5"} { // the second is announced for another service, too
		standby.Services = append(standby.Services, model.Service{Name: fmt.Sprintf("standby%d", i), Announce: model.AnnounceStandby,
			Frontends: []model.Frontend{{Address: netip.MustParseAddr(name)}}})
	}
	_ = says(standby, "", "?192.0.2.11 1")
	_ = says(standby, "")
	_ = says(standby, "192.0.2.11", "+192.0.2.11 1")
	_ = says(standby, "", "?192.0.2.11 1")
	_ = says(all, "", "-192.0.2.11 1")
	delete(there, "eth1")
	c.stuck = errors.New("the group was not left")
	if err := says(all, "", "+2001:db8::10 1", "-2001:db8::10 2", "-203.0.113.5 2"); !errors.Is(err, c.stuck) {
		t.Errorf("a withdrawal failed, and the error is %v", err)
	}
	a.err = errors.New("no sockets")
	if err := says(config(""), ""); !errors.Is(err, a.err) {
		t.Errorf("nothing can be announced, and the error is %v", err)
	}
}
