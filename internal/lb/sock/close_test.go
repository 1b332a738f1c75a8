package sock

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// asOlder has the iterators only name sockets, as on a kernel without bpf_sock_destroy.
type asOlder struct{ DataPlane }

func (o asOlder) LoadBeside(load func() (*ebpf.CollectionSpec, error), own map[string]*ebpf.Map) (*ebpf.Collection, error) {
	return o.DataPlane.LoadBeside(func() (*ebpf.CollectionSpec, error) {
		spec, err := load()
		if err == nil && spec.Variables[sockcloseVarNamesOnly] != nil {
			err = spec.Variables[sockcloseVarNamesOnly].Set(uint8(1))
		}
		return spec, err
	}, own)
}

// eachWay runs a test for both ways to close a socket.
func eachWay(t *testing.T, f func(b *bed)) {
	t.Run("iterator", func(t *testing.T) { f(newBed(t)) })
	t.Run("SOCK_DIAG", func(t *testing.T) {
		b := newBare(t)
		b.options.DataPlane = asOlder{b.options.DataPlane}
		b.open()
		f(b)
	})
}

// pending returns the error that waits at a socket; nil: the socket goes on.
func (s socket) pending() error {
	s.Helper()
	number, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	must(s.T, err)
	if number == 0 {
		return nil
	}
	return unix.Errno(number)
}

// wantClosed has sockets closed, and expects these numbers by reason.
func (b *bed) wantClosed(want Closed) {
	b.Helper()
	counted := func() Closed {
		return Closed{Gone: int(b.outcome("closed_gone")), Down: int(b.outcome("closed_down")), Left: int(b.outcome("closed_left"))}
	}
	before := counted()
	got, err := b.sockets.CloseGone(b.members)
	must(b.T, err)
	if after := counted(); after.Gone-before.Gone != got.Gone || after.Down-before.Down != got.Down || after.Left-before.Left != got.Left {
		b.Errorf("counted %+v before and %+v after %+v", before, after, got)
	}
	if got != want {
		b.Errorf("sockets were closed: %+v, want %+v", got, want)
	}
}

// opened is a socket and its description.
type opened struct {
	socket
	what string
	ends bool
}

// everyKind connects sockets of every kind: sockets to a VIP whose backend will go, and others.
func everyKind(b *bed) (all []opened) {
	add := func(what string, ends bool, family, kind int, to string) {
		s := b.socket(family, kind, 0)
		must(b.T, s.connect(to))
		all = append(all, opened{s, what, ends})
	}
	for name, family := range map[string]int{"IPv4": unix.AF_INET, "IPv4 in IPv6": unix.AF_INET6} {
		add(name+" TCP", true, family, unix.SOCK_STREAM, vip+":80")
		add(name+" UDP", true, family, unix.SOCK_DGRAM, vip+":80")
		add(name+" TCP to another backend", false, family, unix.SOCK_STREAM, vip2+":80")
		add(name+" UDP to another backend", false, family, unix.SOCK_DGRAM, vip2+":80")
		add(name+" TCP to the backend itself", false, family, unix.SOCK_STREAM, first+":8080")
		add(name+" UDP to the backend itself", false, family, unix.SOCK_DGRAM, first+":8080")
		away := b.socket(family, unix.SOCK_DGRAM, 0)
		must(b.T, away.connect(vip+":80"))
		must(b.T, away.connect(first+":8080"))
		all = append(all, opened{away, name + " UDP to the VIP, then to the backend itself", false})
		free := b.socket(family, unix.SOCK_DGRAM, 0)
		must(b.T, free.connect(vip+":80"))
		free.disconnect()
		all = append(all, opened{free, name + " UDP to the VIP, then disconnected", false})
		loose := b.socket(family, unix.SOCK_DGRAM, 0)
		must(b.T, loose.send(vip+":80"))
		all = append(all, opened{loose, name + " UDP, not connected", false})
	}
	add("IPv6 TCP", true, unix.AF_INET6, unix.SOCK_STREAM, "["+vip6+"]:80")
	add("IPv6 UDP", true, unix.AF_INET6, unix.SOCK_DGRAM, "["+vip6+"]:80")
	return all
}

// When a backend goes, its sockets are closed, and no others.
func TestCloseGone(t *testing.T) {
	eachWay(t, func(b *bed) {
		for _, address := range []string{first + ":8080", second + ":8080", "[" + first6 + "]:8080"} {
			b.listenTCP(address)
			b.listenUDP(address)
		}
		stays := service("stays", vip2, one(80), second+":8080")
		b.serve(service("goes", vip, one(80), first+":8080"), service("goes6", vip6, one(80), "["+first6+"]:8080"), stays)
		all := everyKind(b)
		b.wantClosed(Closed{})
		b.serve(service("goes", vip, one(80)), service("goes6", vip6, one(80)), stays)
		count := 0
		for _, s := range all {
			if s.ends {
				count++
			}
		}
		b.wantClosed(Closed{Gone: count})
		for _, s := range all {
			if err := s.pending(); s.ends != errors.Is(err, unix.ECONNABORTED) || !s.ends && err != nil {
				b.Errorf("%s: %v; is to be closed: %v", s.what, err, s.ends)
			}
		}
		b.wantClosed(Closed{})
	})
}

// A backend that is down keeps established connections, and loses the other sockets; one that drains keeps all.
// Packets are treated the same. New sockets go elsewhere, and when the backend is removed, the rest is closed, too.
func TestCloseDown(t *testing.T) {
	eachWay(t, func(b *bed) {
		other := b.listenTCP(second + ":8080")
		b.listenUDP(second + ":8080")
		b.listenUDP(first + ":8080")
		both := func(change func(*model.Backend)) model.Service {
			s := service("web", vip, one(80), first+":8080", other)
			change(&s.Backends[0])
			s.Backends[1].Observed.Idle = s.Backends[0].Share() > 0
			return s
		}
		b.serve(both(func(*model.Backend) {}))
		b.fullListener(first + ":8080")
		established, datagrams := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0), b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		must(b.T, established.connect(vip+":80"))
		must(b.T, datagrams.connect(vip+":80"))
		loose := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		loose.wantAsk(vip+":80", first+":8080", vip+":80")
		handshake := b.socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		if err := handshake.connect(vip + ":80"); !errors.Is(err, unix.EINPROGRESS) {
			b.Fatalf("connecting where the queue is full: %v, want %v", err, unix.EINPROGRESS)
		}
		b.serve(both(func(d *model.Backend) { d.Weight = 0 }))
		b.wantClosed(Closed{})
		b.serve(both(func(d *model.Backend) { d.Observed.Idle, d.Observed.Down = true, true }))
		b.wantClosed(Closed{Down: 2})
		for what, s := range map[string]socket{"a connected UDP socket": datagrams, "a handshake": handshake} {
			if err := s.pending(); !errors.Is(err, unix.ECONNABORTED) {
				b.Errorf("%s of a backend that is down: %v, want %v", what, err, unix.ECONNABORTED)
			}
		}
		if err := established.pending(); err != nil {
			b.Errorf("the established connection to a backend that is down: %v", err)
		}
		loose.wantAsk(vip+":80", other, vip+":80")
		for range 8 {
			fresh := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0)
			must(b.T, fresh.connect(vip+":80"))
			fresh.wantGreeting(other)
		}
		b.serve(service("web", vip, one(80), other))
		b.wantClosed(Closed{Gone: 1})
		if err := established.pending(); !errors.Is(err, unix.ECONNABORTED) {
			b.Errorf("the established connection to a backend that was removed: %v, want %v", err, unix.ECONNABORTED)
		}
	})
}

// With on_down: close a backend that is down loses all sockets of the service, of TCP and UDP, with affinity and without. A client
// of affinity forgets the backend: it goes elsewhere, and stays there when the backend is back.
func TestCloseDownOnRequest(t *testing.T) {
	for name, affinity := range map[string]time.Duration{"no affinity": 0, "affinity": time.Hour} {
		t.Run(name, func(t *testing.T) {
			eachWay(t, func(b *bed) {
				other := b.listenTCP(second + ":8080")
				b.listenUDP(second + ":8080")
				b.listenTCP(first + ":8080")
				b.listenUDP(first + ":8080")
				serve := func(change func(first, second *model.Backend)) {
					s := service("web", vip, one(80), first+":8080", other)
					s.ClosesDown, s.AffinityTimeout = true, affinity
					change(&s.Backends[0], &s.Backends[1])
					b.serve(s)
				}
				serve(func(_, two *model.Backend) { two.Observed.Idle = true })
				connection, datagrams := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0), b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
				must(b.T, connection.connect(vip+":80"))
				must(b.T, datagrams.connect(vip+":80"))
				b.wantClosed(Closed{})
				serve(func(one, _ *model.Backend) { one.Observed.Idle, one.Observed.Down = true, true })
				b.wantClosed(Closed{Left: 2})
				for what, s := range map[string]socket{"the connection": connection, "the connected UDP socket": datagrams} {
					if err := s.pending(); !errors.Is(err, unix.ECONNABORTED) {
						b.Errorf("%s: %v, want %v", what, err, unix.ECONNABORTED)
					}
				}
				connected := func() {
					b.Helper()
					s := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0)
					must(b.T, s.connect(vip+":80"))
					s.wantGreeting(other)
					b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0).wantAsk(vip+":80", other, vip+":80")
				}
				connected()
				serve(func(_, _ *model.Backend) {})
				for range 8 {
					if affinity > 0 {
						connected()
					}
				}
				b.wantClosed(Closed{})
			})
		})
	}
}

// fullListener listens at an address, with a queue that one established connection fills, so that the
// next handshake hangs.
func (b *bed) fullListener(address string) socket {
	b.Helper()
	l := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	must(b.T, unix.SetsockoptInt(l.fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	must(b.T, unix.Bind(l.fd, sockaddr(unix.AF_INET, address)))
	must(b.T, unix.Listen(l.fd, 0))
	return l
}

// A backend that comes back with the same address, and even at the same position, is another one: the
// sockets of its predecessor are closed, and its own stay.
func TestCloseByGeneration(t *testing.T) {
	eachWay(t, func(b *bed) {
		b.listenTCP(first + ":8080")
		web := service("web", vip, one(80), first+":8080")
		b.serve(web)
		old := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		must(b.T, old.connect(vip+":80"))
		b.serve(service("web", vip, one(80)))
		b.serve(web)
		fresh := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		must(b.T, fresh.connect(vip+":80"))
		b.wantClosed(Closed{Gone: 1})
		if old, fresh := old.pending(), fresh.pending(); !errors.Is(old, unix.ECONNABORTED) || fresh != nil {
			b.Errorf("the predecessor's socket: %v, and the new one's: %v", old, fresh)
		}
	})
}

// Sockets are closed in every network namespace that has processes of the cgroup, and only their sockets:
// shunt does not know a socket that it gave no backend.
func TestCloseInEveryNamespace(t *testing.T) {
	eachWay(t, func(b *bed) {
		b.listenTCP(first + ":8080")
		b.serve(service("web", vip, one(80), first+":8080"))
		here := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		must(b.T, here.connect(vip+":80"))
		there := make(chan socket)
		stay, left := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(left)
			b.Run("there", func(t *testing.T) {
				enterPod(t)
				other := *b
				other.T = t
				s := other.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
				must(t, s.connect(vip+":80"))
				there <- s
				<-stay
			})
		}()
		pod, ok := <-there
		if !ok {
			b.Fatal("the other namespace could not be made")
		}
		b.serve(service("web", vip, one(80)))
		b.wantClosed(Closed{Gone: 2})
		if here, pod := here.pending(), pod.pending(); !errors.Is(here, unix.ECONNABORTED) || !errors.Is(pod, unix.ECONNABORTED) {
			b.Errorf("the socket here: %v, and there: %v", here, pod)
		}
		close(stay)
		<-left
	})
}

// A listener that once was a client is no client.
func TestCloseLeavesListeners(t *testing.T) {
	b := newBed(t)
	b.serve(service("web", vip, one(80), first+":8080")) // no server listens there
	s := b.socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err := s.connect(vip + ":80"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatalf("connecting to a backend that does not listen: %v", err)
	}
	must(t, unix.Bind(s.fd, sockaddr(unix.AF_INET, second+":8081")))
	must(t, unix.Listen(s.fd, 1))
	b.serve(service("web", vip, one(80)))
	b.wantClosed(Closed{})
}

// More sockets than fit into one read of the iterator are closed and counted, each once.
func TestCloseMany(t *testing.T) {
	eachWay(t, func(b *bed) {
		b.serve(service("dns", vip, one(53), b.listenUDP(first+":5353")))
		const count = 700 // of 64 bytes each: the kernel's buffer has 32 KiB (bpf_seq_read)
		all := make([]socket, count)
		for i := range all {
			all[i] = b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
			must(b.T, all[i].connect(vip+":53"))
		}
		b.serve(service("dns", vip, one(53)))
		b.wantClosed(Closed{Gone: count})
		for i, s := range all {
			if err := s.pending(); !errors.Is(err, unix.ECONNABORTED) {
				b.Fatalf("socket %d: %v, want %v", i, err, unix.ECONNABORTED)
			}
		}
		b.wantClosed(Closed{})
	})
}

// A backend that leaves one service and stays in another loses the sockets of the first, and no others:
// TCP, connected UDP, and the choices of datagrams. A backend that comes back has new sockets of its own.
func TestCloseLeft(t *testing.T) {
	eachWay(t, func(b *bed) {
		both, other := b.listenTCP(first+":8080"), b.listenTCP(second+":8080")
		b.listenUDP(both)
		b.listenUDP(other)
		a := func(backends ...string) model.Service { return service("a", vip, one(80), backends...) }
		stays := service("b", vip2, one(80), both)
		b.serve(a(both), stays)
		open := func(to string) (all []socket) {
			for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
				s := b.socket(unix.AF_INET, kind, 0)
				must(b.T, s.connect(to))
				all = append(all, s)
			}
			return all
		}
		ofA, ofB := open(vip+":80"), open(vip2+":80")
		loose := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		loose.wantAsk(vip+":80", both, vip+":80")
		ofBoth := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0) // connected to one, and sends to the other
		must(b.T, ofBoth.connect(vip2+":80"))
		must(b.T, ofBoth.send(vip+":80"))
		ofB = append(ofB, ofBoth)
		b.wantClosed(Closed{})

		b.serve(a(other), stays)
		fresh := open(vip + ":80")
		b.wantClosed(Closed{Left: len(ofA)})
		for _, s := range ofA {
			if err := s.pending(); !errors.Is(err, unix.ECONNABORTED) {
				b.Errorf("a socket of the service that the backend has left: %v, want %v", err, unix.ECONNABORTED)
			}
		}
		loose.wantAsk(vip+":80", other, vip+":80")
		b.wantClosed(Closed{})

		b.serve(a(both), stays)
		again := open(vip + ":80")
		b.wantClosed(Closed{Gone: len(fresh)}) // no other service has that one
		for _, s := range append(ofB, again...) {
			if err := s.pending(); err != nil {
				b.Errorf("a socket of the backend's own: %v", err)
			}
		}
	})
}

// More backends that have left than the programs look up at a time are closed in lots.
func TestCloseLeftInLots(t *testing.T) {
	b := newBare(t)
	b.options.DataPlane = withFewPairs{b.options.DataPlane}
	b.open()
	var backends []string
	for i := range 5 {
		backends = append(backends, b.listenUDP(fmt.Sprint(first, ":", 6000+i)))
	}
	stays := service("b", vip2, one(80), backends...)
	b.serve(service("a", vip, value.AnyPort, backends...), stays)
	with := map[string]bool{}
	count := 0
	for ; len(with) < len(backends); count++ { // one of 3 * 10^9 runs takes more than 100
		s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		must(t, s.connect(vip+":80"))
		by, _ := s.ask("")
		with[by] = true
	}
	b.serve(service("a", vip, value.AnyPort), stays)
	b.wantClosed(Closed{Left: count})
	b.wantClosed(Closed{})
}

// withFewPairs has room for two pairs at a time.
type withFewPairs struct{ DataPlane }

func (w withFewPairs) LoadBeside(load func() (*ebpf.CollectionSpec, error), own map[string]*ebpf.Map) (*ebpf.Collection, error) {
	return w.DataPlane.LoadBeside(func() (*ebpf.CollectionSpec, error) {
		spec, err := load()
		if err == nil && spec.Maps[sockcloseMapShSkLeft] != nil {
			spec.Maps[sockcloseMapShSkLeft].MaxEntries = 2
		}
		return spec, err
	}, own)
}
