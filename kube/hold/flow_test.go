package hold

import (
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// message is a message as the kernel writes it, about a TCP connection.
func message(t testing.TB, forward, reverse [2]netip.AddrPort) []byte {
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
				e.Uint8(attributeProtocol, unix.IPPROTO_TCP)
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
	for _, c := range []struct {
		name             string
		forward, reverse [2]netip.AddrPort
		want             [2]netip.AddrPort // source and backend; none: it is not translated
	}{
		{"source and destination", [2]netip.AddrPort{client, service}, [2]netip.AddrPort{pod, masked}, [2]netip.AddrPort{masked, pod}},
		{"IPv6", [2]netip.AddrPort{netip.MustParseAddrPort("[2001:db8::7]:40000"), netip.MustParseAddrPort("[2001:db8::1]:80")}, [2]netip.AddrPort{pod6, masked6}, [2]netip.AddrPort{masked6, pod6}},
		{"the port alone", [2]netip.AddrPort{client, service}, [2]netip.AddrPort{service, netip.AddrPortFrom(client.Addr(), 1024)}, [2]netip.AddrPort{netip.AddrPortFrom(client.Addr(), 1024), service}},
		{"the destination alone", [2]netip.AddrPort{client, service}, [2]netip.AddrPort{pod, client}, [2]netip.AddrPort{}},
		{"none", [2]netip.AddrPort{client, service}, [2]netip.AddrPort{service, client}, [2]netip.AddrPort{}},
	} {
		forward, reverse, err := flow(message(t, c.forward, c.reverse))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		port, ok := translated(forward, reverse)
		if ok != c.want[0].IsValid() || ok && (port.Source != c.want[0] || port.Backend != c.want[1]) {
			t.Errorf("%s: %+v, %t", c.name, port, ok)
		}
	}
	if _, _, err := flow([]byte{2, 0}); err == nil {
		t.Error("half a header is a connection")
	}
}

// FuzzFlow: from any bytes comes an address and port on both sides, or nothing.
func FuzzFlow(f *testing.F) {
	f.Add(message(f, [2]netip.AddrPort{client, service}, [2]netip.AddrPort{pod, masked}))
	f.Add([]byte{2, 0, 0, 0, 8, 0, 1, 0x80, 4, 0, 1, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		forward, reverse, err := flow(data)
		if err != nil {
			return
		}
		if port, ok := translated(forward, reverse); ok && (!port.Source.IsValid() || !port.Backend.IsValid() || port.Source == forward.source) {
			t.Errorf("%x is %+v", data, port)
		}
	})
}
