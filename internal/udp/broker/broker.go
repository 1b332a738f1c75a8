// Package broker lends the UDP path to other processes: it owns the program on each interface, and gives
// memory and sockets to the program that asks for them by the name of an offer and is allowed to have them.
//
//	Open ─► Apply(offers) ─► Apply(offers) … ─► Close
//	            │                   └─ what has not changed keeps its lease
//	            └─ session per connection: Hello, Request ─► lease ─► Serving ─► Renew … ─► over
//
// A lease is over when its holder closes the connection, ends, does not renew it in time or tampers with the
// rings, and when the offer changes. At once then the sockets leave the program's map, so that the kernel's
// stack has the datagrams. Every connection has a session of its own, which waits for nobody else's: a
// client that is slow, silent or hostile has its own lease to lose.
//
// Who a client is the kernel says (Identity). The protocol is package proto.
package broker

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/proto"
	"golang.org/x/sys/unix"
)

const (
	// TermDefault is how long a lease lasts without being renewed.
	TermDefault = 10 * time.Second
	// connectionsMax and connectionsOfUserMax bound what the broker keeps for clients.
	connectionsMax       = 512
	connectionsOfUserMax = 16
)

// Options say where a broker is.
type Options struct {
	Socket string        // path; everybody may connect, and rules decide
	Term   time.Duration // how long a lease lasts without being renewed; 0: TermDefault
	// In runs a function in the network namespace of the interfaces; nil: in the calling thread's.
	In func(func() error) error

	handshake time.Duration // 0: handshakeFor
	bind      time.Duration // 0: bindFor
}

// Broker lends offers. Its methods may be called at any time from several goroutines, but Close last.
type Broker struct {
	options  Options
	listener *net.UnixListener
	running  sync.WaitGroup // the sessions' goroutines, and the listener's

	applying sync.Mutex // Apply and Close, one at a time

	mu          sync.Mutex
	closed      bool
	offers      map[string]*offered
	hooks       map[string]*hook.Hook // by interface
	sessions    map[*session]bool
	connections map[uint32]int        // by user
	refused     map[proto.Code]uint64 // connections that had no lease, by why
	leases      uint64                // given so far: the last lease's number
}

// offered is an offer and what became of it.
type offered struct {
	Offer
	holder   *session // nil: nobody has it
	previous Identity // who had it before
	given    uint64
	ended    map[string]uint64 // leases that are over, by why
	past     Totals            // of leases that are over
}

// Open begins to listen. There is nothing to lease before Apply.
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
		options: options, offers: map[string]*offered{}, hooks: map[string]*hook.Hook{},
		sessions: map[*session]bool{}, connections: map[uint32]int{}, refused: map[proto.Code]uint64{},
	}
	var err error
	if b.listener, err = listen(options.Socket); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", options.Socket, err)
	}
	b.running.Go(b.accept)
	return b, nil
}

// listen makes the socket. One that a dead broker has left is replaced; a living broker's is not.
func listen(path string) (*net.UnixListener, error) {
	address := &net.UnixAddr{Name: path, Net: "unixpacket"}
	l, err := net.ListenUnix("unixpacket", address)
	if errors.Is(err, unix.EADDRINUSE) {
		if c, dialErr := net.DialUnix("unixpacket", nil, address); dialErr == nil {
			_ = c.Close()
			return nil, errors.New("another broker is there; stop it, or choose another path")
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
		if err != nil { // no descriptor is left, for example: it waits in the queue
			time.Sleep(10 * time.Millisecond)
			continue
		}
		b.running.Go(func() { b.serve(c) })
	}
}

// Apply has the broker lend these offers from now on. An offer that is as it was keeps its lease; the leases
// of others end. Nothing is changed if an offer cannot be.
func (b *Broker) Apply(offers []Offer) error {
	if err := checkAll(offers); err != nil {
		return err
	}
	b.applying.Lock()
	defer b.applying.Unlock()
	attached, err := b.attach(offers)
	if err != nil {
		return err
	}
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return errors.Join(errors.New("the broker is closed"), closeHooks(slices.Collect(maps.Values(attached))))
	}
	var over []*session
	before := maps.Clone(b.offers)
	for name, o := range b.offers {
		if i := slices.IndexFunc(offers, func(n Offer) bool { return n.Name == name }); i >= 0 && o.equal(offers[i]) && attached[o.Interface] == nil {
			continue
		}
		if o.holder != nil {
			over = append(over, o.holder)
		}
		delete(b.offers, name)
	}
	b.mu.Unlock()
	for _, s := range over {
		s.revoke("the offer was changed or taken back; ask again if it is still to be had")
		<-s.over
	}
	b.mu.Lock()
	for _, o := range offers {
		if b.offers[o.Name] == nil {
			b.offers[o.Name] = &offered{Offer: o, ended: map[string]uint64{}}
			if was := before[o.Name]; was != nil { // the counters go on
				was.Offer = o
				b.offers[o.Name] = was
			}
		}
	}
	var unused []*hook.Hook
	for name, h := range b.hooks {
		if !slices.ContainsFunc(offers, func(o Offer) bool { return o.Interface == name }) {
			unused = append(unused, h)
			delete(b.hooks, name)
		}
	}
	for name, h := range attached {
		b.hooks[name] = h
	}
	b.mu.Unlock()
	return closeHooks(unused)
}

// attach puts the program on interfaces that have none yet.
func (b *Broker) attach(offers []Offer) (map[string]*hook.Hook, error) {
	attached := map[string]*hook.Hook{}
	for _, o := range offers {
		b.mu.Lock()
		present := b.hooks[o.Interface]
		b.mu.Unlock()
		if attached[o.Interface] != nil {
			continue
		}
		if present != nil {
			if (present.Mode == kernel.ModeGeneric) != (o.hookMode() == kernel.ModeGeneric) && present.Reason == "" {
				return nil, errors.Join(fmt.Errorf("the offer %s has the mode %s, and the program is on interface %s in %s mode: take the interface's offers back first",
					o.Name, o.Mode, o.Interface, present.Mode), closeHooks(slices.Collect(maps.Values(attached))))
			}
			continue
		}
		err := b.options.In(func() (err error) {
			attached[o.Interface], err = hook.Attach(hook.Options{Interface: o.Interface, Mode: o.hookMode()})
			return err
		})
		if err != nil {
			delete(attached, o.Interface)
			return nil, errors.Join(fmt.Errorf("the offer %s: %w", o.Name, err), closeHooks(slices.Collect(maps.Values(attached))))
		}
	}
	return attached, nil
}

func closeHooks(hooks []*hook.Hook) error {
	var errs []error
	for _, h := range hooks {
		errs = append(errs, h.Close())
	}
	return errors.Join(errs...)
}

// Close ends all leases, and takes the programs off.
func (b *Broker) Close() error {
	err := b.Apply(nil)
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
