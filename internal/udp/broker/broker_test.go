package broker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/shunt-lb/shunt/udp"
	"golang.org/x/sys/unix"
)

// A program without any right, in namespaces of its own, answers over a lease; killed, it leaves the datagrams to the
// kernel's socket, and every datagram is accounted for.
func TestWorkerIsKilled(t *testing.T) {
	b := newBed(t, Options{})
	b.until("kernel", nil)
	w := b.worker()
	b.until("xsk", w)
	o := b.is("a lease", func(o OfferStatus) bool { return o.Lease != nil })
	if h := o.Lease.Holder; h.PID != w.Process.Pid || h.UID != nobody || h.GID != nobody || h.Cgroup == "" || o.Lease.Mode != xsk.Copy {
		t.Errorf("held by %s in %s", h, o.Lease.Mode)
	}
	must(t, w.Process.Kill())
	begin := time.Now()
	b.until("kernel", w)
	t.Logf("the kernel's socket answered %s after kill -9", time.Since(begin))
	o = b.is("the lease is over", func(o OfferStatus) bool { return o.Ended[endedDied] == 1 })
	if o.Given != 1 || o.Lease != nil || o.Past.Lost() != 0 || o.Past.Taken == 0 || o.Past.Failed+o.Past.Unknown != 0 {
		t.Errorf("%+v", o)
	}
}

// cycles are leases that end with kill -9, one after the other.
func cycles() int {
	if soak {
		return 1000
	}
	return 8
}

func TestNothingLeaks(t *testing.T) {
	b := newBed(t, Options{})
	cycle := func() (fallback time.Duration) {
		w := b.worker()
		b.until("xsk", w)
		must(t, w.Process.Kill())
		begin := time.Now()
		b.until("kernel", w)
		fallback = time.Since(begin)
		<-w.Ended
		return fallback
	}
	b.until("kernel", nil)
	before := held(t)
	var took []time.Duration
	for range cycles() {
		took = append(took, cycle())
	}
	slices.Sort(took)
	t.Logf("%d fallbacks: median %s, 99 of 100 within %s, the longest %s", len(took), took[len(took)/2], took[len(took)*99/100], took[len(took)-1])
	want := uint64(cycles())
	o := b.is("all leases are over", func(o OfferStatus) bool { return o.Ended[endedDied] == want })
	if o.Given != want || o.Past.Lost() != 0 || o.Past.Failed+o.Past.Unknown != 0 {
		t.Errorf("%+v", o)
	}
	for deadline := time.Now().Add(patience); held(t).exceeds(before); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("held are %+v, and before %+v", held(t), before)
		}
	}
}

// holdings are the resources that a lease could leave in the broker's process.
type holdings struct{ files, mapped, goroutines int }

func (h holdings) exceeds(o holdings) bool {
	return h.files > o.files || h.mapped > o.mapped || h.goroutines > o.goroutines
}

func held(t *testing.T) holdings {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	maps, err := os.ReadFile("/proc/self/maps")
	must(t, err)
	rings, memories := strings.Count(string(maps), "socket:["), strings.Count(string(maps), "/memfd:") // the kernel's names of the mappings
	return holdings{len(entries), rings + memories, runtime.NumGoroutine()}
}

// A worker that is stopped does not renew: its lease ends, and it learns the reason when it goes on.
func TestStoppedWorkerLosesItsLease(t *testing.T) {
	b := newBed(t, Options{Term: time.Second})
	w := b.worker()
	b.until("xsk", w)
	must(t, w.Process.Signal(syscall.SIGSTOP))
	b.until("kernel", w)
	if o := b.is("the lease is over", func(o OfferStatus) bool { return o.Ended["expired"] == 1 }); o.Past.Lost() != 0 {
		t.Errorf("%+v", o)
	}
	must(t, w.Process.Signal(syscall.SIGCONT))
	<-w.Ended
	if !strings.Contains(w.Log(), "the client did not renew it within 1s") {
		t.Errorf("the worker said %q", w.Log())
	}
	// A worker that renews keeps its lease for more than a term.
	w = b.worker()
	b.until("xsk", w)
	o := b.is("a lease", func(o OfferStatus) bool { return o.Lease != nil })
	b.is("it is renewed", func(o OfferStatus) bool { return o.Lease != nil && time.Since(o.Lease.Since) > 2400*time.Millisecond })
	if now := b.broker.Status().Offers[0].Lease; now == nil || now.Number != o.Lease.Number {
		t.Errorf("the worker said %q, the lease is %+v", w.Log(), now)
	}
}

// An offer that changes ends its lease; one that does not keeps it, independently of others.
func TestApply(t *testing.T) {
	b := newBed(t, Options{bind: 100 * time.Millisecond})
	first, second := b.offer(), b.offer()
	first.Queues, second.Queues = []int{0}, []int{1}
	first.Addresses, second.Addresses = b.addresses[:1], b.addresses[1:]
	second.Name = "other"
	must(t, b.broker.Apply([]Offer{first, second}))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	open := func(name string) *udp.Lease {
		t.Helper()
		l, err := udp.Open(ctx, udp.Options{Socket: b.path, Name: name})
		for ctx.Err() == nil && err != nil { // the kernel has not released the queue yet
			l, err = udp.Open(ctx, udp.Options{Socket: b.path, Name: name})
		}
		must(t, err)
		t.Cleanup(func() { must(t, l.Close()) })
		return l
	}
	one, two := open("echo"), open("other")
	if _, err := one.Counts(ctx); err != nil || one.Addresses[0] != b.addresses[0] || len(one.Queues) != 1 || two.Queues[0].Index() != 1 {
		t.Errorf("%v, %+v, %+v", err, one, two)
	}
	second.RingSize = 128
	must(t, b.broker.Apply([]Offer{first, second}))
	<-two.Done()
	var ended *udp.Ended
	if !errors.As(two.Err(), &ended) || ended.Code != "revoked" {
		t.Errorf("the changed offer's lease: %v", two.Err())
	}
	if _, err := one.Counts(ctx); err != nil {
		t.Errorf("the other's: %v", err)
	}
	// A process that keeps the sockets keeps the queue. The next client learns which process that is.
	if _, err := udp.Open(ctx, udp.Options{Socket: b.path, Name: "other"}); !errors.As(err, &ended) || ended.Code != "busy" || !strings.Contains(err.Error(), "may still have its sockets") {
		t.Errorf("a queue that is kept: %v", err)
	}
	must(t, two.Close())
	open("other")
	must(t, b.broker.Apply(nil))
	<-one.Done()
	if n := len(b.broker.Status().Offers); n != 0 {
		t.Errorf("%d offers are left", n)
	}
}

func TestWhatIsRefused(t *testing.T) {
	b := newBed(t, Options{})
	mine, half := b.offer(), b.offer()
	mine.Name, mine.Queues, mine.Addresses = "mine", []int{0}, b.addresses[:1]
	half.Name, half.Queues, half.Addresses = "half", []int{0, 1}, b.addresses[1:]
	must(t, b.broker.Apply([]Offer{mine, half}))
	b.raw().ask("echo").end(proto.EndRefused, `lease "echo": no offer of this name allows process`)
	b.raw().hold("mine")
	b.raw().ask("mine").end(proto.EndBusy, `has "mine"`)
	b.raw().ask("half").end(proto.EndBusy, "end that process, or give the offers different queues")
	mine.Allow = []Rule{user(nobody)}
	must(t, b.broker.Apply([]Offer{mine}))
	b.raw().ask("mine").end(proto.EndRefused, "add a rule for it to the offer")
	if err := b.broker.Apply([]Offer{mine, half, mine}); err == nil {
		t.Error("two offers of one name were accepted")
	}
	if _, err := Open(Options{Socket: b.path}); err == nil || !strings.Contains(err.Error(), "another broker is listening") {
		t.Errorf("a second broker: %v", err)
	}
}

// A client that does not keep to the protocol is told so, and no other client notices.
func TestClientsThatDoNotKeepToTheProtocol(t *testing.T) {
	b := newBed(t, Options{handshake: time.Minute}) // so that the crowd below stays
	w := b.worker()
	b.until("xsk", w)
	hello := &proto.Hello{Magic: proto.Magic, VersionMin: 1, VersionMax: 1}
	b.raw().send(&proto.Ready{}).end(proto.EndProtocol, "it must be a Hello")
	b.raw().send(&proto.Hello{VersionMin: 1, VersionMax: 1}).end(proto.EndProtocol, "it must be a Hello")
	b.raw().send(&proto.Hello{Magic: proto.Magic, VersionMin: 2, VersionMax: 3}).end(proto.EndProtocol, "the versions 2 to 3, and this broker version 1")
	r := b.raw().send(hello)
	r.hear() // before Welcome the kernel need not know a message's sender
	r.send(&proto.Request{}).end(proto.EndProtocol, "the nonce of Welcome")
	b.raw().send(hello, 0).end(proto.EndMalformed, "does not come with 1 files")
	r = b.raw()
	_, err := r.conn.Unix().Write([]byte{99, 0, 1, 0, 8, 0, 0, 0})
	must(t, err)
	r.end(proto.EndMalformed, "there is no type 99")
	must(t, b.raw().send(hello).conn.Close())
	b.is("the worker is alone", func(OfferStatus) bool { return b.broker.Status().Connections == 1 }) // a client that has gone counts for a while

	var crowd []*raw
	for range connectionsOfUserMax {
		crowd = append(crowd, b.raw().send(hello))
	}
	for _, r := range crowd { // each has a session
		r.hear()
	}
	b.raw().end(proto.EndTooMany, "user 0 already has 16 connections")
	b.until("xsk", w) // beside the crowd
	for _, r := range crowd {
		must(t, r.conn.Close())
	}
	refused := b.broker.Status().Refused
	if refused["protocol"] != 4 || refused["malformed"] != 2 || refused["expired"] != 0 || refused["too many"] == 0 {
		t.Errorf("refused: %v", refused)
	}
}

// A client that says nothing gets the message that its time is over.
func TestSilentClientsExpire(t *testing.T) {
	b := newBed(t, Options{handshake: 300 * time.Millisecond})
	b.raw().end(proto.EndExpired, "within 300ms of connecting")
	if refused := b.broker.Status().Refused; refused["expired"] != 1 {
		t.Errorf("refused: %v", refused)
	}
}

// A connection that one process has made is of no use to another one.
func TestConnectionsAreNotPassedOn(t *testing.T) {
	b := newBed(t, Options{})
	r := b.raw().send(&proto.Hello{Magic: proto.Magic, VersionMin: 1, VersionMax: 1})
	body, _ := r.hear()
	request := &proto.Request{Nonce: body.(*proto.Welcome).Nonce}
	proto.Put(request.Name[:], "echo")
	file, err := r.conn.Unix().File()
	must(t, err)
	defer file.Close() //nolint:errcheck // a copy
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.Stdin, cmd.ExtraFiles = []string{senderVariable + "=1"}, bytes.NewReader(proto.Encode(request)), []*os.File{file}
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "<nil>\n" {
		t.Fatalf("%v: %s", err, out)
	}
	r.end(proto.EndProtocol, fmt.Sprintf("process %d connected, but process %d sent a message", os.Getpid(), cmd.Process.Pid))
}

// A flood of good messages ends the flooder's lease.
func TestFlood(t *testing.T) {
	b := newBed(t, Options{})
	r := b.raw()
	number, _ := r.hold("echo")
	for range 10 * burstMax {
		if err := r.conn.Send(&proto.Renew{Lease: number}, patience); err != nil {
			break // the broker closed the connection
		}
	}
	b.is("the lease is over", func(o OfferStatus) bool { return o.Ended["too many"] == 1 })
	b.until("kernel", nil)
}

// ringOf maps one of a socket's rings, as a hostile client can.
func ringOf(t *testing.T, fd int, page int64, offset func(unix.XDPMmapOffsets) unix.XDPRingOffset) (index *uint32, first *uint64) {
	t.Helper()
	var o unix.XDPMmapOffsets
	size := uint32(unsafe.Sizeof(o))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_XDP, unix.XDP_MMAP_OFFSETS, uintptr(unsafe.Pointer(&o)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	r := offset(o)
	ring, err := unix.Mmap(fd, page, int(r.Desc)+64*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	t.Cleanup(func() { must(t, unix.Munmap(ring)) })
	return (*uint32)(unsafe.Pointer(&ring[r.Producer])), (*uint64)(unsafe.Pointer(&ring[r.Desc]))
}

// A client that lies in its rings has its own lease to lose. It maps them before they are bound, as Linux 6.1
// wants it.
func TestRingsThatLie(t *testing.T) {
	for name, lie := range map[string]func(*testing.T, *xsk.Set) (now func()){
		"a producer out of range": func(t *testing.T, set *xsk.Set) func() {
			index, _ := ringOf(t, set.Sockets[0].FD(), unix.XDP_UMEM_PGOFF_FILL_RING, func(o unix.XDPMmapOffsets) unix.XDPRingOffset { return o.Fr })
			return func() { atomic.AddUint32(index, 1<<20) }
		},
		"a descriptor outside the memory": func(t *testing.T, set *xsk.Set) func() {
			index, first := ringOf(t, set.Sockets[0].FD(), unix.XDP_PGOFF_TX_RING, func(o unix.XDPMmapOffsets) unix.XDPRingOffset { return o.Tx })
			return func() {
				*first = 1 << 40
				atomic.StoreUint32(index, 1)
				_ = unix.Sendto(set.Sockets[0].FD(), nil, unix.MSG_DONTWAIT, nil) // the kernel's counter shows the result
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, Options{})
			r := b.raw()
			var now func()
			r.hold("echo", func(set *xsk.Set) { now = lie(t, set) })
			now()
			r.end(proto.EndTampered, "keep the lease of echo")
			b.is("the lease is over", func(o OfferStatus) bool { return o.Ended["tampered"] == 1 })
			b.until("kernel", nil)
		})
	}
}

// With Kill, a process that keeps a lease that is over is ended.
func TestKill(t *testing.T) {
	b := newBed(t, Options{Term: 300 * time.Millisecond})
	offer := b.offer()
	offer.Kill = true
	must(t, b.broker.Apply([]Offer{offer}))
	w := b.worker()
	b.until("xsk", w)
	must(t, w.Process.Signal(syscall.SIGSTOP))
	select {
	case <-w.Ended:
	case <-time.After(patience):
		t.Fatalf("it lives: %+v", b.broker.Status())
	}
	if b.until("xsk", b.worker()); b.broker.Status().Offers[0].Ended["expired"] != 1 {
		t.Errorf("%+v", b.broker.Status())
	}
}

// TestHandOverTakes measures a lease's whole hand-over: dialling, memory of two queues, mapping, binding; then giving
// it back. The kernel releases the queues some milliseconds later, which the next one waits for.
func TestHandOverTakes(t *testing.T) {
	b := newBed(t, Options{})
	for range 5 {
		begin := time.Now()
		l, err := udp.Open(context.Background(), udp.Options{Socket: b.path, Name: "echo"})
		must(t, err)
		opened := time.Since(begin)
		begin = time.Now()
		must(t, l.Close())
		t.Logf("open %s, close %s", opened, time.Since(begin))
		b.is("the lease is over", func(o OfferStatus) bool { return o.Lease == nil && o.Ended[endedClosed] == o.Given })
	}
}

// A program can send frames of its own making, and ask for the counts of its datagrams.
func TestFramesOfItsOwn(t *testing.T) {
	b := newBed(t, Options{})
	l, err := udp.Open(context.Background(), udp.Options{Socket: b.path, Name: "echo", Checked: true})
	must(t, err)
	defer func() { must(t, l.Close()) }()
	_, err = b.conn.Write([]byte("ask me"))
	must(t, err)
	var q *udp.Queue
	received, own := make([]udp.Descriptor, 1), make([]udp.Descriptor, 1)
	for deadline := time.Now().Add(patience); q == nil; {
		if _, err := l.Wait(time.Second); err != nil || time.Now().After(deadline) {
			t.Fatalf("no datagram came: %v", err)
		}
		for _, each := range l.Queues {
			if each.Receive(received) == 1 {
				q = each
			}
		}
	}
	if q.Reserve(own) != 1 {
		t.Fatal("no frame is free")
	}
	own[0].Len = uint32(copy(q.Bytes(&own[0]), q.Bytes(&received[0])))
	q.Release(received)
	must(t, q.Reply(&own[0]))
	if q.Send(own) != 1 {
		t.Fatal("the ring has no room")
	}
	must(t, q.Flush())
	must(t, b.conn.SetReadDeadline(time.Now().Add(patience)))
	answer := make([]byte, 64)
	if n, err := b.conn.Read(answer); err != nil || string(answer[:n]) != "ask me" {
		t.Errorf("%q: %v", answer, err)
	}
	s, err := q.Statistics()
	must(t, err)
	all, err := l.Counts(context.Background())
	must(t, err)
	matched := uint64(0)
	for _, c := range all {
		matched += c.Matched
	}
	if s.Taken != 1 || s.Waiting != 0 || matched != 1 || q.Counts().Sent != 1 {
		t.Errorf("%+v, %+v, %+v", s, all, q.Counts())
	}
}
