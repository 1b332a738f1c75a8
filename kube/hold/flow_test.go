package hold

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// message is a message as the kernel writes it.
func message(t testing.TB, protocol uint8, forward, reverse [2]netip.AddrPort) []byte {
	t.Helper()
	e := netlink.NewAttributeEncoder()
	for kind, ends := range map[uint16][2]netip.AddrPort{attributeForward: forward, attributeReverse: reverse} {
		e.Nested(kind, func(e *netlink.AttributeEncoder) error {
			e.Nested(attributeAddresses, func(e *netlink.AttributeEncoder) error {
				source, to := uint16(attributeSource4), uint16(attributeTo4)
				if ends[0].Addr().Is6() {
					source, to = attributeSource6, attributeTo6
				}
				e.Bytes(source, ends[0].Addr().AsSlice())
				e.Bytes(to, ends[1].Addr().AsSlice())
				return nil
			})
			e.Nested(attributePorts, func(e *netlink.AttributeEncoder) error {
				e.Uint8(attributeProtocol, protocol)
				for i, kind := range []uint16{attributeSourcePort, attributeToPort} {
					e.Bytes(kind, []byte{byte(ends[i].Port() >> 8), byte(ends[i].Port())})
				}
				return nil
			})
			return nil
		})
	}
	text, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte{unix.AF_INET, 0, 0, 0}, text...)
}

var (
	client, service = netip.MustParseAddrPort("192.0.2.7:40000"), netip.MustParseAddrPort("192.0.2.1:30080")
	pod, masked     = netip.MustParseAddrPort("10.244.1.5:8080"), netip.MustParseAddrPort("10.244.1.1:61000")
	pod6, masked6   = netip.MustParseAddrPort("[fd00::5]:8080"), netip.MustParseAddrPort("[fd00::1]:61000")
)

func TestFlow(t *testing.T) {
	client6, service6 := netip.MustParseAddrPort("[2001:db8::7]:40000"), netip.MustParseAddrPort("[2001:db8::1]:80")
	given := netip.AddrPortFrom(client.Addr(), 1024)
	for _, c := range []struct {
		name             string
		protocol         uint8
		forward, reverse [2]netip.AddrPort
		sources          []netip.AddrPort // towards the source of the reverse; none: it is not translated
	}{
		{"source and destination", unix.IPPROTO_TCP, [2]netip.AddrPort{client, service}, [2]netip.AddrPort{pod, masked}, []netip.AddrPort{masked, client}},
		{"IPv6", unix.IPPROTO_TCP, [2]netip.AddrPort{client6, service6}, [2]netip.AddrPort{pod6, masked6}, []netip.AddrPort{masked6, client6}},
		{"UDP", unix.IPPROTO_UDP, [2]netip.AddrPort{client, service}, [2]netip.AddrPort{pod, masked}, []netip.AddrPort{masked}},
		{"SCTP", unix.IPPROTO_SCTP, [2]netip.AddrPort{client, service}, [2]netip.AddrPort{pod, masked}, nil},
		{"the port alone", unix.IPPROTO_TCP, [2]netip.AddrPort{client, service}, [2]netip.AddrPort{service, given}, []netip.AddrPort{given, client}},
		{"the destination alone", unix.IPPROTO_TCP, [2]netip.AddrPort{client, service}, [2]netip.AddrPort{pod, client}, nil},
		{"none", unix.IPPROTO_TCP, [2]netip.AddrPort{client, service}, [2]netip.AddrPort{service, client}, nil},
	} {
		forward, reverse, err := flow(message(t, c.protocol, c.forward, c.reverse))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		var want []store.SourcePort
		for _, source := range c.sources {
			want = append(want, store.SourcePort{Protocol: model.Protocol(c.protocol), Source: source, Backend: c.reverse[0]})
		}
		if ports := translated(forward, reverse); !slices.Equal(ports, want) {
			t.Errorf("%s: %+v, want %+v", c.name, ports, want)
		}
	}
	if _, _, err := flow([]byte{2, 0}); err == nil {
		t.Error("half a header is a connection")
	}
}

// FuzzFlow: from any bytes come addresses and ports on both sides, or nothing.
func FuzzFlow(f *testing.F) {
	f.Add(message(f, unix.IPPROTO_TCP, [2]netip.AddrPort{client, service}, [2]netip.AddrPort{pod, masked}))
	f.Add([]byte{2, 0, 0, 0, 8, 0, 1, 0x80, 4, 0, 1, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		forward, reverse, err := flow(data)
		if err != nil {
			return
		}
		for i, port := range translated(forward, reverse) {
			if !port.Source.IsValid() || !port.Backend.IsValid() || i == 0 && port.Source == forward.source {
				t.Errorf("%x is %+v", data, port)
			}
		}
	})
}
