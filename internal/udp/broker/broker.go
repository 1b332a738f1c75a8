// Package broker lends the UDP path to other processes: it owns the program on each interface, and gives
// memory and sockets to the program that asks for them by the name of an offer and is allowed to have them.
//
//	Open ─► Apply(offers) ─► Apply(offers) … ─► Close
//	            │                   └─ an offer that has not changed keeps its lease
//	            └─ session per connection: Hello, Request ─► lease ─► Serving ─► Renew … ─► over
//
// A lease is over when its holder closes the connection, ends, does not renew it in time or tampers with the
// rings, and when the offer changes. The sockets then leave the program's map at once, so that the kernel's
// stack gets the datagrams. Every connection has a session of its own, which never waits for another one: a
// client that is slow, silent or hostile can lose only its own lease.
//
// The kernel identifies a client (Identity). The protocol is package proto.
package broker

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/proto"
)

const (
	// TermDefault is the time after which a lease that was not renewed is over.
	TermDefault = 10 * time.Second
	// connectionsMax and connectionsOfUserMax limit the connections that the broker keeps, of all users and of each.
	connectionsMax       = 512
	connectionsOfUserMax = 16
)

// Options configure a broker.
type Options struct {
	Socket string        // path; everybody may connect, and the offers' rules decide
	Term   time.Duration // time after which a lease that was not renewed is over; 0: TermDefault
	// In runs a function in the network namespace of the interfaces; nil: in the calling thread's.
	In func(func() error) error
	// Keep makes leases outlive this process; nil: they end with it.
	Keep *Keep

	handshake time.Duration // 0: handshakeFor
	bind      time.Duration // 0: bindFor
}

// Broker lends offers. Its methods may be called at any time from several goroutines, but Close must be the last call.
type Broker struct {
	options  Options
	listener *net.UnixListener
	running  sync.WaitGroup // the sessions' goroutines, and the listener's

	applying sync.Mutex // held by Apply and Close, one at a time

	mu          sync.Mutex
	closed      bool
	offers      map[string]*offered
	hooks       map[string]*attached // by interface; written with applying held as well
	sessions    map[*session]bool
	connections map[uint32]int        // by user
	refused     map[proto.Code]uint64 // connections that got no lease, by reason
	leases      uint64                // given so far: the last lease's number
	inherited   map[uint64]note       // leases of the previous broker on interfaces that have no program yet
	awaited     map[uint64]*awaited   // leases of the previous broker on interfaces that have one
	lost        map[uint64]lost       // leases of the previous broker that are over
	begun, lack map[string]uint64     // by offer: leases of the previous broker, and those of them that are lost, until count adds them

	keeping sync.Mutex      // guards notes and their file, and goes before mu
	notes   map[uint64]note // the contents of the file
	swept   bool            // guarded by applying
	left    chan struct{}   // closed by Leave
	ends    chan struct{}   // closed by Close and Leave
}

// attached is the program on an interface, and the mode that the offers ask for.
type attached struct {
	*hook.Hook
	asked kernel.Mode
}

// offered is an offer and its state.
type offered struct {
	Offer
	failed   error    // why the interface has no program; nil: it has
	holder   *session // nil: no session has it
	guard    *guard   // nil: datagrams that no socket takes pass; written with applying held as well
	previous Identity // the last holder
	given    uint64
	resumed  uint64            // of them, leases of the previous broker
	ended    map[string]uint64 // leases that are over, by reason
	lastEnd  string            // reason of the last end
	past     sums              // of leases that are over, and of guards
	claimed  *proto.Claim      // of leases that are over; nil: no program has reported any
}

// Open begins to listen. It lends nothing before Apply.
func Open(options Options) (*Broker, error) {
	if options.Term == 0 {
		options.Term = TermDefault
	}
	if options.handshake == 0 {
		options.handshake = handshakeFor
	}
	if options.bind == 0 {
		options.bind = bindFor
	}
	if options.In == nil {
		options.In = func(f func() error) error { return f() }
	}
	b := &Broker{
		options: options, offers: map[string]*offered{}, hooks: map[string]*attached{},
		sessions: map[*session]bool{}, connections: map[uint32]int{}, refused: map[proto.Code]uint64{},
		inherited: map[uint64]note{}, awaited: map[uint64]*awaited{}, lost: map[uint64]lost{}, notes: map[uint64]note{},
		begun: map[string]uint64{}, lack: map[string]uint64{},
		left: make(chan struct{}), ends: make(chan struct{}),
	}
	if options.Keep != nil {
		keep := *options.Keep
		if b.options.Keep = &keep; keep.Await == 0 {
			keep.Await = AwaitDefault
		}
	}
	err := b.inherit()
	if err != nil {
		return nil, err
	}
	if b.listener, err = listen(options.Socket); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", options.Socket, err)
	}
	b.running.Go(b.accept)
	if len(b.inherited) > 0 {
		b.running.Go(b.watch)
	}
	return b, nil
}

// listen makes the socket. It replaces the socket of a dead broker, but not a living broker's.
func listen(path string) (*net.UnixListener, error) {
	address := &net.UnixAddr{Name: path, Net: "unixpacket"}
	l, err := net.ListenUnix("unixpacket", address)
	if errors.Is(err, unix.EADDRINUSE) {
		if c, dialErr := net.DialUnix("unixpacket", nil, address); dialErr == nil {
			_ = c.Close()
			return nil, errors.New("another broker is listening; stop it, or choose another path")
		} else if !errors.Is(dialErr, unix.ECONNREFUSED) {
			return nil, err
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		l, err = net.ListenUnix("unixpacket", address)
	}
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o666); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// accept gives each connection a session, until the listener is closed.
func (b *Broker) accept() {
	for {
		c, err := b.listener.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptor is left, for example: the connection waits in the queue
			time.Sleep(10 * time.Millisecond)
			continue
		}
		b.running.Go(func() { b.serve(c) })
	}
}

// Unattached says that some of the offers that Apply was given cannot be leased, because the program could not be put on
// their interfaces. The others are in force. Apply with the same offers tries again.
type Unattached struct {
	By map[string]error // by interface
}

func (u *Unattached) Error() string {
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(u.By)) {
		texts = append(texts, u.By[name].Error())
	}
	return strings.Join(texts, "; ")
}

// Apply makes the broker lend these offers from now on. An offer that has not changed, except for Drop, keeps its lease; the
// leases of others end. Offers that contradict each other are refused, and then nothing changes. If the program cannot be
// put on an interface, the offers of other interfaces are in force all the same, and the error is *Unattached.
func (b *Broker) Apply(offers []Offer) error {
	if err := checkAll(offers); err != nil {
		return err
	}
	b.applying.Lock()
	defer b.applying.Unlock()
	keep := b.fitting(offers)
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return errors.New("the broker is closed")
	}
	unused := b.takeHooks(keep)
	before := maps.Clone(b.offers)
	over := b.takeOffers(offers)
	b.mu.Unlock()
	for _, s := range over {
		s.revoke("the offer was changed or removed; ask again if it still exists")
		<-s.over
	}
	b.endAwaited()
	unguarded := b.endGuards(before, offers)
	err := errors.Join(closeHooks(unused), b.sweep(offers))
	attached, failed := b.attach(offers)
	b.mu.Lock()
	maps.Copy(b.hooks, attached)
	for _, o := range offers {
		if b.offers[o.Name] != nil {
			continue
		}
		b.offers[o.Name] = &offered{Offer: o, ended: map[string]uint64{}}
		if was := before[o.Name]; was != nil { // the counters go on
			was.Offer = o
			b.offers[o.Name] = was
		}
	}
	for _, o := range b.offers {
		o.failed = failed[o.Interface]
	}
	b.count()
	b.mu.Unlock()
	b.beginGuards(unguarded)
	if len(failed) > 0 {
		err = errors.Join(err, &Unattached{failed})
	}
	if len(unguarded) > 0 {
		err = errors.Join(err, &Unguarded{unguarded})
	}
	return err
}

// fitting returns the interfaces whose program can stay for these offers: an offer needs it, in the same mode, and the
// interface is still the one that the program is on.
func (b *Broker) fitting(offers []Offer) map[string]bool {
	keep := map[string]bool{}
	for _, o := range offers {
		if h := b.hooks[o.Interface]; h != nil && h.asked == o.hookMode() && !b.gone(h) {
			keep[o.Interface] = true
		}
	}
	return keep
}

// Stale reports whether an offered interface has been replaced by another one of its name since the program was put on
// it, or has another program now. Apply with the same offers puts the program on the new one, or returns the reason why
// it cannot. A program whose host has gone is put on the interface here, and its leases go on.
func (b *Broker) Stale() bool {
	b.applying.Lock()
	defer b.applying.Unlock()
	for _, h := range b.hooks {
		if b.gone(h) {
			return true
		}
	}
	return false
}

func (b *Broker) gone(h *attached) (gone bool) {
	_ = b.options.In(func() error {
		gone = h.Gone() || h.Settle() != nil
		return nil
	})
	return gone
}

// takeHooks removes from the broker the programs that do not stay, and returns them.
func (b *Broker) takeHooks(keep map[string]bool) (unused []*attached) {
	for name, h := range b.hooks {
		if !keep[name] {
			unused = append(unused, h)
			delete(b.hooks, name)
		}
	}
	return unused
}

// takeOffers removes from the broker the offers that do not stay, and returns their holders.
func (b *Broker) takeOffers(offers []Offer) (over []*session) {
	for name, o := range b.offers {
		if i := slices.IndexFunc(offers, func(n Offer) bool { return n.Name == name && o.equal(n) }); i >= 0 && b.hooks[o.Interface] != nil {
			o.Drop = offers[i].Drop
			continue
		}
		if o.holder != nil {
			over = append(over, o.holder)
		}
		delete(b.offers, name)
	}
	return over
}

// endAwaited ends leases of the previous broker whose offers do not stay.
func (b *Broker) endAwaited() {
	b.mu.Lock()
	var over []*awaited
	for _, a := range b.awaited {
		if b.offers[a.Offer.Name] == nil {
			over = append(over, a)
		}
	}
	b.mu.Unlock()
	for _, a := range over {
		b.over(a, proto.EndRevoked.String(), "the offer was changed or removed")
		<-a.ending.over
	}
}

// attach puts the program on interfaces that have none yet, and returns the errors by interface.
func (b *Broker) attach(offers []Offer) (all map[string]*attached, failed map[string]error) {
	all, failed = map[string]*attached{}, map[string]error{}
	for _, o := range offers {
		name := o.Interface
		if b.hooks[name] != nil || all[name] != nil || failed[name] != nil {
			continue
		}
		options, goOn := hook.Options{Interface: name, Mode: o.hookMode()}, b.goOn(name, offers)
		if k := b.options.Keep; k != nil {
			options.Kept, options.GoOn = k.folder(name), kept(goOn)
		}
		err := b.options.In(func() error {
			h, err := hook.Attach(options)
			if err == nil {
				all[name] = &attached{h, o.hookMode()}
				b.await(h, goOn)
				if len(goOn) == 0 {
					err = h.Forget()
				}
			}
			return err
		})
		if err != nil {
			failed[name] = err
		}
	}
	return all, failed
}

func closeHooks(hooks []*attached) error {
	var errs []error
	for _, h := range hooks {
		errs = append(errs, h.Close())
	}
	return errors.Join(errs...)
}

// Close ends all leases, and takes the programs off.
func (b *Broker) Close() error {
	err := b.Apply(nil)
	close(b.ends)
	b.mu.Lock()
	b.closed = true
	for s := range b.sessions {
		s.revoke("the broker ends")
	}
	b.mu.Unlock()
	err = errors.Join(err, b.listener.Close())
	b.running.Wait()
	if err != nil {
		return fmt.Errorf("end the broker at %s: %w", b.options.Socket, err)
	}
	return nil
}
