package sock

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
	"github.com/shunt-lb/shunt/test/space"
)

const nodePort = 30080

// at6 adds the frontends and backends of a service of IPv6 to a service.
func at6(s model.Service, six model.Service) model.Service {
	s.Frontends, s.Backends = append(s.Frontends, six.Frontends...), append(s.Backends, six.Backends...)
	return s
}

// enterPod moves the calling test's thread into another network namespace, whose lo is up and has the address of
// the backends.
func enterPod(t *testing.T) {
	t.Helper()
	space.Enter(t, fmt.Sprintf("shunt-sk-%d-%d-pod", os.Getpid(), testCount.Load()))
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	must(t, netlink.LinkSetUp(lo))
	address, err := netlink.ParseAddr(first + "/32")
	must(t, err)
	must(t, netlink.AddrAdd(lo, address))
}

// inAPod runs a test after enterPod, and in the bed's cgroup.
func (b *bed) inAPod(name string, f func(pod *bed)) {
	b.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.Run(name, func(t *testing.T) {
			enterPod(t)
			pod := *b
			pod.T = t
			f(&pod)
		})
	}()
	<-done
}

// Clients on this host have a service of their own at a frontend whose service says so, and other clients do not.
func TestInside(t *testing.T) {
	b := newBed(t)
	outer, inner := b.listenTCP(first+":8080"), b.listenTCP(second+":8080")
	b.listenUDP(outer)
	b.listenUDP(inner)
	everybodys := service("web@external", vip, one(80), outer)
	everybodys.Policy.Inside = true
	others := service("plain", vip2, one(80), outer) // it does not say so
	own := service("web", vip, one(80), inner)
	own.Frontends = append(own.Frontends, service("", vip2, one(80)).Frontends...)
	for i := range own.Frontends {
		own.Frontends[i].Protocol |= model.Inside
	}
	asks := func(at, backend string) {
		t.Helper()
		tcp := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		must(t, tcp.connect(at+":80"))
		tcp.wantGreeting(backend)
		tcp.wantPeer(at + ":80")
		b.socket(unix.AF_INET6, unix.SOCK_DGRAM, 0).wantAsk(at+":80", backend, at+":80")
	}
	b.serve(everybodys, others) // the state before the frontends of the other one are written
	asks(vip, outer)
	b.serve(everybodys, others, own)
	asks(vip, inner)
	asks(vip2, outer)

	stays := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	stays.wantAsk(vip+":80", inner, vip+":80")
	own.Backends = nil
	own.Policy.Rejects = true
	b.serve(everybodys, others, own)
	if err := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0).connect(vip + ":80"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("without a backend of its own: %v, want %v", err, unix.ECONNREFUSED)
	}
	everybodys.Policy.Inside = false
	b.serve(everybodys, others, own)
	asks(vip, outer)
	stays.wantAsk(vip+":80", outer, vip+":80")
}

// A service at a loopback address is at all loopback addresses of the family, for the host's own sockets.
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

// A pod's connections to its loopback addresses reach the pod's own sockets.
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

// bindTo binds a new socket, and closes it.
func (b *bed) bindTo(family, kind int, at string) error {
	b.Helper()
	s := b.socket(family, kind, 0)
	must(b.T, unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	must(b.T, unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
	return unix.Bind(s.fd, sockaddr(family, at))
}

// No program of the host can bind a port that the host has a service at, as if another program had it. A pod's
// port is its own, and a service at other addresses takes no port of the host.
func TestBind(t *testing.T) {
	b := newBed(t)
	web := at6(service("web", "127.0.0.1", one(nodePort), first+":8080"), service("web", "::1", one(nodePort), "["+first6+"]:8080"))
	web.Frontends = append(web.Frontends, service("", first, one(nodePort)).Frontends...)
	only6 := service("only6", "::1", one(nodePort+1), "["+first6+"]:8080")
	b.serve(web, only6, service("vip", second, one(nodePort+2), first+":8080"),
		service("ranges", "127.0.0.1", value.PortRange{First: 40000, Last: 40001}, first+":8080"))
	for _, c := range []struct {
		family int
		at     string
		taken  bool
	}{
		{unix.AF_INET, fmt.Sprint("0.0.0.0:", nodePort), true},
		{unix.AF_INET, fmt.Sprint("127.0.0.1:", nodePort), true},
		{unix.AF_INET, fmt.Sprint("127.3.2.1:", nodePort), true},
		{unix.AF_INET, fmt.Sprint(first, ":", nodePort), true},
		{unix.AF_INET, fmt.Sprint(second, ":", nodePort), false}, // an address that the service does not have
		{unix.AF_INET6, fmt.Sprint("[::]:", nodePort), true},
		{unix.AF_INET6, fmt.Sprint("[::1]:", nodePort), true},
		{unix.AF_INET6, fmt.Sprint("0.0.0.0:", nodePort), true},
		{unix.AF_INET6, fmt.Sprint("[", first6, "]:", nodePort), false},
		{unix.AF_INET, fmt.Sprint("0.0.0.0:", nodePort+1), false},
		{unix.AF_INET6, fmt.Sprint("[::]:", nodePort+1), true},
		{unix.AF_INET, fmt.Sprint(second, ":", nodePort+2), false}, // its backend may listen there
		{unix.AF_INET, fmt.Sprint("0.0.0.0:", nodePort+2), false},
		{unix.AF_INET, "0.0.0.0:40001", true},
		{unix.AF_INET, "0.0.0.0:0", false},
	} {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
			before := b.outcome("port_taken")
			if err := b.bindTo(c.family, kind, c.at); c.taken != errors.Is(err, unix.EADDRINUSE) || !c.taken && err != nil {
				t.Errorf("binding to %s, kind %d: %v; it is taken: %v", c.at, kind, err, c.taken)
			}
			if counted := b.outcome("port_taken") > before; counted != c.taken {
				t.Errorf("binding to %s, kind %d, was counted: %v", c.at, kind, counted)
			}
		}
	}
	b.inAPod("pod", func(pod *bed) {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
			must(pod.T, pod.bindTo(unix.AF_INET, kind, fmt.Sprint("0.0.0.0:", nodePort)))
			must(pod.T, pod.bindTo(unix.AF_INET6, kind, fmt.Sprint("[::1]:", nodePort)))
		}
	})
}
