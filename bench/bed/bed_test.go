package bed

import "testing"

func TestUDPValue(t *testing.T) {
	const text = "Tcp: A RcvbufErrors\nTcp: 1 2\nUdp: InDatagrams NoPorts RcvbufErrors\nUdp: 7 8 9\nUdpLite: RcvbufErrors\nUdpLite: 3\n"
	if n, err := udpValue(text, "RcvbufErrors"); n != 9 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	for _, text := range []string{"", "Udp: InDatagrams\nUdp: 7\n", "Udp: InDatagrams RcvbufErrors\nUdp: 7\n"} {
		if n, err := udpValue(text, "RcvbufErrors"); err == nil {
			t.Errorf("%q: %d", text, n)
		}
	}
}
