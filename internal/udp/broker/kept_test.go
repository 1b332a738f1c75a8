package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/shunt-lb/shunt/udp"
)

// keepingBed is a bed whose leases outlive the broker.
type keepingBed struct {
	*bed
	options Options
}

func newKeepingBed(t *testing.T, options Options, await time.Duration) *keepingBed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	must(t, kernel.Mount(kernel.DefaultPinRoot, slog.New(slog.DiscardHandler)))
	keep := &Keep{Pins: filepath.Join(kernel.DefaultPinRoot, fmt.Sprintf("shunt-test-%d", os.Getpid())), Record: filepath.Join(t.TempDir(), "leases"), Await: await}
	t.Cleanup(func() { // the broker is closed
		if _, err := os.Lstat(keep.Pins); err == nil {
			t.Errorf("%s is left", keep.Pins)
		}
		if _, err := os.Lstat(keep.Record); err == nil {
			t.Errorf("%s is left", keep.Record)
		}
		must(t, keep.Remove())
	})
	options.Keep = keep
	b := newBed(t, options)
	options.Socket, options.In = b.path, b.server.Run
	return &keepingBed{b, options}
}

// leave ends the broker in the way that keeps its leases.
func (b *keepingBed) leave() {
	b.t.Helper()
	must(b.t, b.broker.Leave())
}

// again starts the next broker.
func (b *keepingBed) again(offers ...Offer) {
	b.t.Helper()
	var err error
	b.broker, err = Open(b.options)
	must(b.t, err)
	must(b.t, b.broker.Apply(offers))
}

// resumable skips the test where no lease can be resumed.
func (b *keepingBed) resumable() {
	b.t.Helper()
	udptest.NeedsBoundRings(b.t, b.server)
}

// resume is greeted, and hands files back.
func (b *keepingBed) resume(number uint64, files ...int) *raw {
	b.t.Helper()
	r := b.raw().send(&proto.Hello{Magic: proto.Magic, VersionMin: 1, VersionMax: 1})
	body, _ := r.hear()
	return r.send(&proto.Resume{Nonce: body.(*proto.Welcome).Nonce, Lease: number, QueueCount: uint32(len(files) - 1)}, files...)
}

// A worker's lease goes on without a broker, and with the next one: with its counters, and without the worker's help.
func TestLeaseOutlivesItsBroker(t *testing.T) {
	b := newKeepingBed(t, Options{}, 0)
	b.resumable()
	w := b.worker()
	b.until("xsk", w)
	before := b.is("a lease", func(o OfferStatus) bool { return o.Lease != nil })
	for range 3 {
		b.leave()
		for range 20 {
			b.until("xsk", w)
		}
		b.again(b.offer())
		o := b.is("it is resumed", func(o OfferStatus) bool { return o.Lease != nil })
		b.until("xsk", w)
		if o.Given != 1 || o.Resumed != 1 || o.Lease.Number != before.Lease.Number || o.Lease.Holder.PID != w.Process.Pid || !o.Lease.Since.Equal(before.Lease.Since) ||
			o.Lease.Totals().Matched < before.Lease.Totals().Matched+20 || o.Lease.Totals().Taken < 20 || o.Lease.Totals().PassedNoSocket != 0 {
			t.Errorf("%+v was %+v", o, before)
		}
	}
	if n := strings.Count(w.Log(), "serving as"); n != 1 {
		t.Errorf("it has asked %d times: %s", n, w.Log())
	}
	b.kill(w)
	b.until("kernel", w)
	if o := b.is("the lease is over", func(o OfferStatus) bool { return o.Ended[endedDied] == 1 }); o.Past.Lost() != 0 || o.Past.Failed+o.Past.Unknown != 0 {
		t.Errorf("%+v", o)
	}
}

// A worker that ends while there is no broker leaves its datagrams to the kernel's socket, and the next one its lease.
func TestHolderEndsWithoutABroker(t *testing.T) {
	b := newKeepingBed(t, Options{}, time.Hour)
	w := b.worker()
	b.until("xsk", w)
	b.leave()
	b.kill(w)
	b.until("kernel", nil)
	b.again(b.offer())
	o := b.is("the lease is over", func(o OfferStatus) bool { return o.Ended[endedDied] == 1 })
	if o.Given != 1 || o.Resumed != 0 || o.Lease != nil || o.Awaited != nil || o.LastEnd != endedDied || o.Past.Unknown != 1 || o.Past.Failed != 0 {
		t.Errorf("%+v", o)
	}
	b.until("xsk", b.worker())
}

// A process that lives and does not come back loses its lease after a while, and learns the reason if it comes later.
func TestHolderDoesNotComeBack(t *testing.T) {
	b := newKeepingBed(t, Options{}, time.Hour)
	number, set := b.raw().hold("echo")
	b.leave()
	b.again(b.offer())
	if o := b.broker.Status().Offers[0]; o.Awaited == nil || o.Awaited.PID != os.Getpid() {
		t.Errorf("nobody is awaited: %+v", o)
	}
	b.leave()
	b.options.Keep.Await = 500 * time.Millisecond
	b.again(b.offer())
	if o := b.is("the lease is over", func(o OfferStatus) bool { return o.Ended["expired"] == 1 }); o.Awaited != nil || o.Past.Failed != 0 {
		t.Errorf("%+v", o)
	}
	b.until("kernel", nil)
	b.resume(number, set.Files()...).end(proto.EndRevoked, "did not come back within 500ms of the broker's start; ask for a new one")
}

// A lease is its holder's, and its files are the lease's. A process that has neither disturbs nobody.
func TestWhatIsNotResumed(t *testing.T) {
	b := newKeepingBed(t, Options{}, 0)
	b.resumable()
	number, set := b.raw().hold("echo")
	b.leave()
	b.again(b.offer())
	files := set.Files()
	b.resume(number+1, files...).end(proto.EndRevoked, "resume lease")
	b.resume(number, files[0], files[2], files[1]).end(proto.EndProtocol, "the files are not the files of Grant")
	b.resume(number, files[0], files[1]).end(proto.EndProtocol, "the files are not the files of Grant")
	b.resume(number, files[1], files[1], files[2]).end(proto.EndProtocol, "the files are not the files of Grant")
	other, err := xsk.NewMemory(set.Sockets[0].Layout.Size())
	must(t, err)
	defer func() { must(t, other.Close()) }()
	b.resume(number, other.FD, files[1], files[2]).end(proto.EndProtocol, "the files are not the files of Grant")
	null, err := os.Open(os.DevNull)
	must(t, err)
	defer null.Close() //nolint:errcheck // nothing was written
	b.resume(number, files[0], int(null.Fd()), files[2]).end(proto.EndProtocol, "the files are not the files of Grant")
	r := b.resume(number, files...)
	if body, _ := r.hear(); body.(*proto.Serving).Lease != number {
		t.Errorf("%+v", body)
	}
	body, _ := r.send(&proto.Renew{Lease: number, Sequence: 7}).hear()
	if body.(*proto.Renewed).Sequence != 7 {
		t.Errorf("%+v", body)
	}
	b.resume(number, files...).end(proto.EndRevoked, "resume lease") // it has a broker

	must(t, r.conn.Close())
	must(t, set.Close())
	w := b.worker()
	b.until("xsk", w)
	held := b.is("a lease", func(o OfferStatus) bool { return o.Lease != nil })
	must(t, w.Process.Signal(syscall.SIGSTOP))
	b.leave()
	b.again(b.offer())
	b.resume(held.Lease.Number, 0, 0, 1).end(proto.EndRefused, "another process had the lease")
	must(t, w.Process.Signal(syscall.SIGCONT))
	b.is("its holder resumes it", func(o OfferStatus) bool { return o.Resumed == 1 })
}

// An offer that differs for the next broker ends its lease, with the reason, and the holder asks anew.
func TestOfferChangesBetweenBrokers(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Offer)
		want   string
	}{
		"changed":    {func(o *Offer) { o.RingSize = 128 }, "the offer echo was changed while no broker ran"},
		"taken back": {func(o *Offer) { o.Name = "other" }, "the offer echo was removed while no broker ran"},
		"forbidden":  {func(o *Offer) { o.Allow = []Rule{user(1)} }, "the offer echo was changed while no broker ran"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newKeepingBed(t, Options{}, 0)
			w := b.worker()
			b.until("xsk", w)
			b.leave()
			offer := b.offer()
			c.change(&offer)
			b.again(offer)
			b.until("kernel", w)
			<-w.Ended
			if !strings.Contains(w.Log(), c.want) {
				t.Errorf("the worker said %q", w.Log())
			}
			if o := b.broker.Status().Offers[0]; o.Name == "echo" && (o.Ended["revoked"] != 1 || o.Given != 1 || o.Past.Unknown != 1) {
				t.Errorf("%+v", o)
			}
		})
	}
}

// A broker whose maps have another layout takes the program off, and tells the holder.
func TestLayoutChangesBetweenBrokers(t *testing.T) {
	b := newKeepingBed(t, Options{}, 0)
	w := b.worker()
	b.until("xsk", w)
	b.leave()
	folders, err := filepath.Glob(filepath.Join(b.options.Keep.folder("eth0"), "maps-*"))
	if err != nil || len(folders) != 1 {
		t.Fatalf("the maps are in %v, %v", folders, err)
	}
	must(t, os.Rename(folders[0], filepath.Join(filepath.Dir(folders[0]), "maps-0")))
	b.again(b.offer())
	b.until("kernel", w)
	<-w.Ended
	if !strings.Contains(w.Log(), "or belong to another version; ask for a new one") {
		t.Errorf("the worker said %q", w.Log())
	}
	b.until("xsk", b.worker())
}

// A record that cannot be read ends all leases, and nothing is left of them.
func TestRecordIsDamaged(t *testing.T) {
	b := newKeepingBed(t, Options{}, 0)
	w := b.worker()
	b.until("xsk", w)
	b.leave()
	must(t, os.WriteFile(b.options.Keep.Record, []byte("{"), 0o600))
	b.again(b.offer())
	b.until("kernel", w)
	<-w.Ended
	if !strings.Contains(w.Log(), "did not leave it to its successor; ask for a new lease") {
		t.Errorf("the worker said %q", w.Log())
	}
	b.until("xsk", b.worker())
}

// A holder that asks for a new lease, as clients do that do not know Resume, has given up its old one.
func TestHolderAsksAnew(t *testing.T) {
	b := newKeepingBed(t, Options{}, 0)
	_, set := b.raw().hold("echo")
	b.leave()
	must(t, set.Close())
	b.again(b.offer())
	b.raw().hold("echo")
	if o := b.broker.Status().Offers[0]; o.Ended[endedClosed] != 1 || o.Given != 2 || o.Lease == nil || o.Awaited != nil {
		t.Errorf("%+v", o)
	}
}

// Another process gets the name of the process that has the queues.
func TestAwaitedLeaseIsInTheWay(t *testing.T) {
	b := newKeepingBed(t, Options{}, 0)
	b.resumable()
	w := b.worker()
	b.until("xsk", w)
	must(t, w.Process.Signal(syscall.SIGSTOP))
	b.leave()
	b.again(b.offer())
	b.raw().ask("echo").end(proto.EndBusy, fmt.Sprintf("process %d (user 65534", w.Process.Pid))
	must(t, w.Process.Signal(syscall.SIGCONT))
	b.is("its holder resumes it", func(o OfferStatus) bool { return o.Resumed == 1 })
	b.until("xsk", w)
}

// A client in C finds the next broker, and counts as it does.
func TestAccountInCOutlivesTheBroker(t *testing.T) {
	b := newKeepingBed(t, Options{Term: 300 * time.Millisecond}, 0)
	b.resumable()
	udptest.EachCompiler(t, func(t *testing.T, c udptest.Compiler) {
		b.t = t
		binary := c.Program(t, filepath.Dir(b.path), "../../../udp/c/testdata/check.c")
		p := b.start(binary, "account", b.path, "300")
		b.until("xsk", p)
		b.leave()
		for range 50 {
			b.until("xsk", p)
		}
		b.again(b.offer())
		b.is("it is resumed", func(o OfferStatus) bool { return o.Resumed == 1 })
		for since := *b.asked + 1; !b.ask("kernel", since); { // it has ended
		}
		<-p.Ended
		if err := p.Err(); err != nil {
			t.Fatalf("%v: %s", err, p.Log())
		}
		if o := b.is("the lease is over", func(o OfferStatus) bool { return o.Lease == nil && o.Given == 1 && len(o.Ended) == 1 }); o.Past.Lost() != 0 || o.Past.Matched < 300 || o.Past.Unknown != 0 {
			t.Errorf("%+v", o)
		}
		b.leave()
		b.again(b.offer())
	})
}

// A broker that cannot write down a lease does not lend it.
func TestLeaseThatCannotBeKept(t *testing.T) {
	b := newKeepingBed(t, Options{}, 0)
	must(t, os.Mkdir(b.options.Keep.Record+".new", 0o700))
	r := b.raw()
	body, files := r.ask("echo").hear()
	set, err := xsk.AdoptSet(body.(*proto.Grant).Layouts(), files)
	must(t, err)
	r.send(&proto.Ready{Lease: body.(*proto.Grant).Lease}).end(proto.EndFailed, "record that a lease has begun")
	must(t, set.Close())
	must(t, os.Remove(b.options.Keep.Record+".new"))
	if entries, err := os.ReadDir(b.options.Keep.Pins); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pinned are %v, %v", entries, err)
	}
	if flags := body.(*proto.Grant).Flags; flags&proto.FlagResume == 0 {
		t.Errorf("the flags are %d", flags)
	}
	b.until("xsk", b.worker())
}

// A client in Go counts how often its lease was resumed, and asks the next broker for counters that have gone on. It
// also ends well while there is no broker.
func TestClientBetweenBrokers(t *testing.T) {
	b := newKeepingBed(t, Options{}, 0)
	b.resumable()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := udp.Open(ctx, udp.Options{Socket: b.path, Name: "echo", Checked: true})
	must(t, err)
	b.leave()
	if _, err := l.Counts(ctx); err == nil || l.Err() != nil {
		t.Errorf("without a broker: %v, %v", err, l.Err())
	}
	for range 5 {
		_, err := b.conn.Write([]byte("nobody reads it"))
		must(t, err)
	}
	b.again(b.offer())
	b.is("it is resumed, and has the datagrams", func(o OfferStatus) bool {
		if o.Resumed != 1 {
			return false
		}
		totals := o.Lease.Totals()
		return totals.Waiting == 5
	})
	for l.Resumed() == 0 {
		if err := ctx.Err(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	counts, err := l.Counts(ctx)
	must(t, err)
	matched := uint64(0)
	for _, c := range counts {
		matched += c.Matched
	}
	if o := b.broker.Status().Offers[0]; matched != 5 || o.Lease.Totals().Waiting != 5 || o.Lease.Totals().Lost() != 0 || l.Resumed() != 1 {
		t.Errorf("%d matched, and the broker says %+v", matched, o.Lease)
	}
	b.leave()
	begin := time.Now()
	must(t, l.Close())
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("to close it took %s without a broker", took)
	}
	b.until("kernel", nil)
	b.options.Keep.Await = 100 * time.Millisecond // nobody comes
	b.again(b.offer())
	b.is("the lease is over", func(o OfferStatus) bool { return o.Ended["expired"] == 1 && o.Lease == nil })
}
