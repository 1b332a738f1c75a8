package net

import (
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestSegmentsAreBounded: with tcp_mss, real TCP at both ends of a connection sends no larger
// segments, over both families, with checksums left to hardware and without.
func TestSegmentsAreBounded(t *testing.T) {
	const most = 1300
	for _, way := range []struct {
		attach    string
		noOffload bool
	}{{"native", false}, {"native", true}, {"generic", false}} {
		t.Run(fmt.Sprintf("%s, offload %v", way.attach, !way.noOffload), func(t *testing.T) {
			b := newBed(t, lab.Options{Layout: lab.TwoArm, Backends: 1, NoOffload: way.noOffload})
			b.write(b.file(settings{attach: way.attach, more: fmt.Sprintf(
				"  - name: bounded\n    address: [%s, %q]\n    port: 9000\n    tcp_mss: %d\n    backends:\n%s", lab.VIP4, lab.VIP6, most, b.backends(nil, 9000))}))
			b.start()
			listener, err := b.Backends[0].Listen("tcp", ":9000")
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			for _, vip := range vips {
				client, err := b.Client.Dial(within(t, answerTimeout), "tcp", at(vip, 9000))
				if err != nil {
					t.Fatal(err)
				}
				backend, err := listener.Accept()
				if err != nil {
					t.Fatal(err)
				}
				go func() { _, _ = io.Copy(backend, backend) }()
				text := make([]byte, 100_000)
				go func() { _, _ = client.Write(text) }()
				if _, err := io.ReadFull(client, text); err != nil {
					t.Errorf("%s: what was sent does not come back: %v", family(vip), err)
				}
				for name, end := range map[string]net.Conn{"the client": client, "the backend": backend} {
					if got := segmentOf(t, end); got > most || got < most-20 { // less because of the timestamps
						t.Errorf("%s: %s sends segments of %d bytes, want at most %d", family(vip), name, got, most)
					}
				}
				_ = client.Close()
				_ = backend.Close()
			}
		})
	}
}

// segmentOf is the size of the segments that one end of a connection sends.
func segmentOf(t *testing.T, c net.Conn) (bytes int) {
	t.Helper()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	var fault error
	if err := raw.Control(func(fd uintptr) {
		info, fault = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}); err != nil || fault != nil {
		t.Fatal(err, fault)
	}
	return int(info.Snd_mss)
}
