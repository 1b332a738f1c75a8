package sock

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/test/space"
)

const nodePort = 30080

// at6 adds the frontends and backends of IPv6 to a service.
func at6(s model.Service, six model.Service) model.Service {
	s.Frontends, s.Backends = append(s.Frontends, six.Frontends...), append(s.Backends, six.Backends...)
	return s
}

// inAPod runs a test in another network namespace, whose lo is up and has the address of the backends,
// and in the bed's cgroup.
func (b *bed) inAPod(name string, f func(pod *bed)) {
	b.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.Run(name, func(t *testing.T) {
			space.Enter(t, fmt.Sprintf("shunt-sk-%d-%d-pod", os.Getpid(), testCount.Load()))
			lo, err := netlink.LinkByName("lo")
			must(t, err)
			must(t, netlink.LinkSetUp(lo))
			address, err := netlink.ParseAddr(first + "/32")
			must(t, err)
			must(t, netlink.AddrAdd(lo, address))
			pod := *b
			pod.T = t
			f(&pod)
		})
	}()
	<-done
}

// A service at a loopback address is one at all of the family's, for the host's own sockets.
func TestLoopback(t *testing.T) {
	b := newBed(t)
	backend, backend6 := b.listenTCP(first+":8080"), b.listenTCP("["+first6+"]:8080")
	b.listenUDP(backend)
	b.listenUDP(backend6)
	b.serve(at6(service("web", "127.0.0.1", one(nodePort), backend), service("web", "::1", one(nodePort), backend6)))
	for _, c := range []struct {
		family      int
		at, backend string
	}{
		{unix.AF_INET, "127.0.0.1", backend},
		{unix.AF_INET, "127.255.1.2", backend},
		{unix.AF_INET6, "127.0.0.1", backend},
		{unix.AF_INET6, "[::1]", backend6},
	} {
		to := fmt.Sprint(c.at, ":", nodePort)
		tcp := b.socket(c.family, unix.SOCK_STREAM, 0)
		must(t, tcp.connect(to))
		tcp.wantGreeting(c.backend)
		tcp.wantPeer(to)
		udp := b.socket(c.family, unix.SOCK_DGRAM, 0)
		udp.wantAsk(to, c.backend, to)
		must(t, udp.connect(to))
		udp.wantPeer(to)
		udp.wantAsk("", c.backend, to)
	}
	for _, to := range []string{"127.0.0.1:30081", "126.0.0.1:30080", "128.0.0.1:30080"} {
		if err := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0).connect(to); err == nil {
			t.Errorf("connected to %s, where there is no service", to)
		}
	}
}

// What a pod has at its loopback address is its own.
func TestLoopbackOfAPod(t *testing.T) {
	b := newBed(t)
	b.serve(at6(service("web", "127.0.0.1", one(nodePort), first+":8080"), service("web", "::1", one(nodePort), "["+first6+"]:8080")))
	b.inAPod("pod", func(pod *bed) {
		pod.listenTCP(first + ":8080")
		pod.listenUDP(first + ":8080")
		for _, c := range []struct {
			family int
			at     string
		}{{unix.AF_INET, "127.0.0.1"}, {unix.AF_INET, "127.0.0.9"}, {unix.AF_INET6, "127.0.0.10"}, {unix.AF_INET6, "[::1]"}} {
			at := fmt.Sprint(c.at, ":", nodePort)
			if err := pod.socket(c.family, unix.SOCK_STREAM, 0).connect(at); !errors.Is(err, unix.ECONNREFUSED) {
				pod.Errorf("connecting to %s in a pod where nobody listens: %v, want %v", at, err, unix.ECONNREFUSED)
			}
			own := pod.listenTCP(at)
			pod.listenUDP(at)
			tcp := pod.socket(c.family, unix.SOCK_STREAM, 0)
			must(pod.T, tcp.connect(at))
			tcp.wantGreeting(own)
			udp := pod.socket(c.family, unix.SOCK_DGRAM, 0)
			udp.wantAsk(at, own, at)
			tcp.wantPeer(at)
		}
	})
	if n := b.outcome("chosen"); n != 0 {
		t.Errorf("a backend was chosen %d times for a pod's own address", n)
	}
}
