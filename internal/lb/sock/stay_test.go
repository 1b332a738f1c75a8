package sock

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// asked returns the backend that a new socket is given.
func (b *bed) asked() string {
	b.Helper()
	s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	must(b.T, s.connect(vip+":53"))
	by, _ := s.ask("")
	must(b.T, unix.Shutdown(s.fd, unix.SHUT_RDWR))
	return by
}

// clients returns the backends that clients with affinity stay with.
func (b *bed) clients() map[sockSockClient]sockSockStay {
	b.Helper()
	all := map[sockSockClient]sockSockStay{}
	var client sockSockClient
	var stay sockSockStay
	entries := b.sockets.maps[sockMapShSkClients].Iterate()
	for entries.Next(&client, &stay) {
		all[client] = stay
	}
	must(b.T, entries.Err())
	return all
}

// age lengthens the time since clients have asked.
func (b *bed) age(by time.Duration) {
	b.Helper()
	for client, stay := range b.clients() {
		stay.Used -= uint64(by)
		must(b.T, b.sockets.maps[sockMapShSkClients].Update(client, stay, ebpf.UpdateExist))
	}
}

// stayTime is the timeout of affinity. Times count from the start of the machine, and a virtual machine
// that was started for this test is not much older than that.
const stayTime = 20 * time.Second

// stays returns a service with affinity.
func stays(backends ...string) model.Service {
	s := service("stays", vip, one(53), backends...)
	s.AffinityTimeout = stayTime
	return s
}

// All sockets of a namespace go to one backend, even if slots name others, until it takes no new ones, or until
// the time is over; then they go to any backend.
func TestAffinity(t *testing.T) {
	b := newBed(t)
	at := []string{b.listenUDP(first + ":5353"), b.listenUDP(second + ":5353"), b.listenUDP(first + ":5354")}
	b.serve(stays(at[0]))
	same := func(when, want string) {
		t.Helper()
		for range 32 {
			if got := b.asked(); got != want {
				t.Fatalf("%s: a socket went to %s, want %s", when, got, want)
			}
		}
	}
	same("at first", at[0])
	if n := b.outcome("affinity"); n != 31 {
		t.Errorf("affinity decided %d times, want 31", n)
	}
	b.serve(stays(at...))
	same("with more backends", at[0])
	b.age(stayTime / 2)
	same("before the time is over", at[0])
	b.age(stayTime / 2)
	same("twice", at[0]) // a client asked in between
	drains := stays(at...)
	drains.Backends[0].Weight = 0
	b.serve(drains)
	now := b.asked()
	if now == at[0] {
		t.Errorf("a backend that drains was given to a new socket")
	}
	same("after the first one drains", now)
	eventually(t, "once the time is over, a socket goes elsewhere", func() bool {
		b.age(stayTime + time.Second)
		return b.asked() != now
	})
}

// Each network namespace is a client of its own.
func TestAffinityOfAPod(t *testing.T) {
	b := newBed(t)
	b.serve(stays(b.listenUDP(first + ":5353")))
	b.asked()
	b.inAPod("pod", func(pod *bed) {
		pod.listenUDP(first + ":5353")
		pod.asked()
	})
	if all := b.clients(); len(all) != 2 {
		t.Errorf("the clients are %v, want two", all)
	}
}

// A client does not stay with a backend that has left its service, and is another one's still.
func TestAffinityLeft(t *testing.T) {
	b := newBed(t)
	backend, other := b.listenUDP(first+":5353"), b.listenUDP(second+":5353")
	also := service("also", vip2, one(53), backend)
	also.AffinityTimeout = time.Hour
	b.serve(stays(backend), also)
	b.asked()
	s := b.socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	must(t, s.connect(vip2+":53"))
	b.serve(stays(other), also)
	if got := b.asked(); got != other {
		t.Errorf("a new socket went to %s, which has left, and not to %s", got, other)
	}
	if all := b.clients(); len(all) != 2 {
		t.Errorf("the clients are %v, want two: the other service's stays", all)
	}
}
