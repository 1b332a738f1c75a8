package broker

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"time"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/process"
	"github.com/shunt-lb/shunt/internal/record"
	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/lease"
	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// Leases outlive the broker's process if there is an Options.Keep. While an interface has a lease, its program and maps
// are pinned (hook.Keep), and each lease is written down. The sockets live in the holder's process, so datagrams come
// as before while there is no broker; if the holder ends too, the kernel takes its sockets out of the map.
//
//	note (file) ─► awaited ─► resumed: the holder handed the files back
//	     │            └─────► over: the holder has ended, did not come in time, or has asked for a new lease
//	     └► lost: the offer has changed, or the program could not be attached
//
// The broker believes no client: the kernel identifies the process, and marks identify the files that it hands back.

// Keep has the places in which a broker leaves leases for the next one.
type Keep struct {
	Pins   string        // folder of bpffs that only this broker uses
	Record string        // path of a file that does not survive a reboot
	Await  time.Duration // the time that the next broker waits for the holders; 0: AwaitDefault
}

// AwaitDefault is the time that a broker waits for the holders of the previous broker's leases. They try at least once
// a second.
const AwaitDefault = 10 * time.Second

// note is a lease as the file has it.
type note struct {
	Number  uint64      `json:"number"`
	Offer   Offer       `json:"offer"`
	Space   uint64      `json:"space"`   // network namespace of the interface, inode
	Ifindex int         `json:"ifindex"` // of the interface, in that namespace
	Lease   int         `json:"lease"`   // the hook's number
	Grant   lease.Grant `json:"grant"`
	Marks   xsk.Marks   `json:"marks"`
	Holder  Identity    `json:"holder"`
	Began   uint64      `json:"began"` // when the holder's process began: process.StartTicks
	Since   time.Time   `json:"since"`
}

// noted is the file's content.
type noted struct {
	Leases []note `json:"leases"`
}

// ending tells sessions that want the same queues of a lease's end.
type ending struct {
	ending chan struct{} // closed when the lease begins to end
	over   chan struct{} // closed when its parts are gone
}

func newEnding() ending { return ending{make(chan struct{}), make(chan struct{})} }

// awaited is a lease of the previous broker whose holder has not come back yet.
type awaited struct {
	note
	ending
	lease *lease.Lease
	ends  bool // guarded by Broker.mu: the lease cannot be resumed any more
}

// folder returns the folder in which an interface's program is pinned.
func (k *Keep) folder(iface string) string { return filepath.Join(k.Pins, kernel.ToPin(iface)) }

// inherit reads the notes of the previous broker.
func (b *Broker) inherit() error {
	if b.options.Keep == nil {
		return nil
	}
	var all noted
	if err := record.Read(b.options.Keep.Record, &all); err != nil {
		// Without the file no lease can be told from another: they end, and their holders ask for new ones.
		if err := record.Remove(b.options.Keep.Record); err != nil {
			return fmt.Errorf("read the leases that go on: %w", err)
		}
	}
	for _, n := range all.Leases {
		b.inherited[n.Number], b.notes[n.Number] = n, n
		b.begun[n.Offer.Name]++
		b.leases = max(b.leases, n.Number)
	}
	return nil
}

// write writes notes to the file. The caller holds keeping.
func (b *Broker) write() error {
	if len(b.notes) == 0 {
		return record.Remove(b.options.Keep.Record)
	}
	var all noted
	for _, n := range b.notes {
		all.Leases = append(all.Leases, n)
	}
	if err := os.MkdirAll(filepath.Dir(b.options.Keep.Record), 0o755); err != nil {
		return err
	}
	return record.Write(b.options.Keep.Record, all)
}

// space returns the network namespace of the interfaces.
func (b *Broker) space() (inode uint64, err error) {
	err = b.options.In(func() (err error) {
		inode, err = host.Netns()
		return err
	})
	return inode, err
}

// keep makes a lease that is about to serve outlive this process.
func (b *Broker) keep(s *session) error {
	if b.options.Keep == nil {
		return nil
	}
	space, err := b.space()
	if err != nil {
		return err
	}
	marks, err := xsk.MarksOf(s.lease.Set().Files())
	if err != nil {
		return err
	}
	b.keeping.Lock()
	defer b.keeping.Unlock()
	if err := s.hook.Keep(b.options.Keep.folder(s.hook.Interface)); err != nil {
		return err
	}
	b.notes[s.number] = note{Number: s.number, Offer: s.offered.spared(), Space: space, Ifindex: s.hook.Ifindex, Lease: s.lease.Number(),
		Grant: s.lease.Grant, Marks: marks, Holder: s.peer.Identity, Began: s.peer.began, Since: s.since}
	if err := b.write(); err != nil {
		return fmt.Errorf("record that a lease has begun: %w", err)
	}
	return nil
}

// forget undoes keep for a lease that is over. h is nil if the lease's program has gone.
func (b *Broker) forget(number uint64, h *hook.Hook) error {
	if b.options.Keep == nil {
		return nil
	}
	b.keeping.Lock()
	defer b.keeping.Unlock()
	if _, is := b.notes[number]; !is {
		return nil
	}
	delete(b.notes, number)
	var errs []error
	if err := b.write(); err != nil {
		errs = append(errs, fmt.Errorf("record that a lease is over: %w", err))
	}
	if h == nil {
		return errors.Join(errs...)
	}
	for _, n := range b.notes {
		if n.Offer.Interface == h.Interface {
			return errors.Join(errs...)
		}
	}
	return errors.Join(append(errs, h.Forget())...)
}

// goOn returns the leases of an interface that can go on with these offers; the others are lost. The caller holds applying.
func (b *Broker) goOn(iface string, offers []Offer) (all []note) {
	if b.options.Keep == nil {
		return nil
	}
	space, err := b.space()
	var index int
	if err == nil {
		err = b.options.In(func() error {
			index = kernel.InterfaceIndex(iface)
			return nil
		})
	}
	b.mu.Lock()
	inherited := make([]note, 0, len(b.inherited))
	for _, n := range b.inherited {
		inherited = append(inherited, n)
	}
	b.mu.Unlock()
	for _, n := range inherited {
		if n.Offer.Interface != iface {
			continue
		}
		why := fits(&n, offers)
		if why == "" && (err != nil || n.Space != space || n.Ifindex != index) {
			why = fmt.Sprintf("interface %s has been replaced by another one of this name", iface)
		}
		if why != "" {
			b.lose(n, why)
			continue
		}
		all = append(all, n)
	}
	return all
}

// fits returns the reason why a lease does not go on with these offers; "": it does.
func fits(n *note, offers []Offer) string {
	for _, o := range offers {
		switch {
		case o.Name != n.Offer.Name:
		case !o.equal(n.Offer):
			return fmt.Sprintf("the offer %s was changed while no broker ran", o.Name)
		default:
			return ""
		}
	}
	return fmt.Sprintf("the offer %s was removed while no broker ran", n.Offer.Name)
}

// lose notes that a lease cannot go on: no process has its datagrams any more.
func (b *Broker) lose(n note, why string) {
	b.mu.Lock()
	delete(b.inherited, n.Number)
	b.lost[n.Number] = lost{n.Offer.Name, why}
	b.lack[n.Offer.Name]++
	b.mu.Unlock()
	_ = b.forget(n.Number, nil) // the file is written again with the next lease
}

// lost is a lease of the previous broker that is over.
type lost struct{ offer, why string }

// count adds the ends of the previous broker's leases to their offers, as soon as the broker has these. The caller holds mu.
func (b *Broker) count() {
	for name, o := range b.offers {
		o.given += b.begun[name]
		if n := b.lack[name]; n > 0 {
			o.lastEnd = proto.EndRevoked.String()
			o.ended[o.lastEnd] += n
			o.past.all.Unknown += n
		}
		delete(b.begun, name)
		delete(b.lack, name)
	}
}

// await makes leases that go on awaited ones, on an interface whose program was taken over, or loses them. The caller holds applying.
func (b *Broker) await(h *hook.Hook, all []note) {
	for _, n := range all {
		if !h.Adopted() {
			b.lose(n, fmt.Sprintf("the program of interface %s and its maps are gone, or belong to another version", n.Offer.Interface))
			continue
		}
		a := &awaited{note: n, ending: newEnding(), lease: lease.TakeOver(h, n.Lease, n.Grant)}
		b.mu.Lock()
		delete(b.inherited, n.Number)
		b.awaited[n.Number] = a
		b.mu.Unlock()
	}
}

// kept returns leases that go on as the hook names them.
func kept(all []note) (goOn []hook.Kept) {
	for _, n := range all {
		goOn = append(goOn, hook.Kept{Lease: n.Lease, Addresses: n.Grant.Serves, Stamped: n.Offer.Stamped})
	}
	return goOn
}

// sweep removes the previous broker's pins and notes on interfaces that are not offered any more.
func (b *Broker) sweep(offers []Offer) error {
	if b.options.Keep == nil || b.swept {
		return nil
	}
	b.swept = true
	offered := map[string]bool{}
	for _, o := range offers {
		offered[kernel.ToPin(o.Interface)] = true
	}
	b.mu.Lock()
	var gone []note
	for _, n := range b.inherited {
		if !offered[kernel.ToPin(n.Offer.Interface)] {
			gone = append(gone, n)
		}
	}
	b.mu.Unlock()
	for _, n := range gone {
		b.lose(n, fits(&n, offers))
	}
	return removeKept(b.options.Keep.Pins, func(pin string) bool { return !offered[pin] })
}

func removeKept(pins string, which func(pin string) bool) error {
	entries, err := os.ReadDir(pins)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list the programs that are kept in %s: %w", pins, err)
	}
	var errs []error
	for _, e := range entries {
		if which(e.Name()) {
			errs = append(errs, hook.RemoveKept(filepath.Join(pins, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// Remove removes the pins and the file that a broker that was killed, or left, has kept. If there are none, that is
// success. No broker with the same Keep may be running.
func (k *Keep) Remove() error {
	return errors.Join(removeKept(k.Pins, func(string) bool { return true }), record.Remove(k.Record))
}

// watch ends leases whose holders do not come back: at once if the process has ended, and all of them after a while.
func (b *Broker) watch() {
	deadline := time.NewTimer(b.options.Keep.Await)
	defer deadline.Stop()
	look := time.NewTicker(auditEvery)
	defer look.Stop()
	late := false
	for {
		select {
		case <-b.ends:
			return
		case <-look.C:
		case <-deadline.C:
			late = true
		}
		b.mu.Lock()
		var over []*awaited
		for _, a := range b.awaited {
			if late || !a.lives() {
				over = append(over, a)
			}
		}
		b.mu.Unlock()
		for _, a := range over {
			if a.lives() {
				b.over(a, proto.EndExpired.String(), fmt.Sprintf("its holder did not come back within %s of the broker's start", b.options.Keep.Await))
			} else {
				b.over(a, endedDied, "its holder has ended")
			}
		}
		if late { // Apply may have worked on them meanwhile
			b.loseAll()
		}
		b.mu.Lock()
		left := len(b.awaited) + len(b.inherited)
		b.mu.Unlock()
		if left == 0 {
			return
		}
	}
}

// loseAll gives up leases on interfaces that got no program.
func (b *Broker) loseAll() {
	b.applying.Lock()
	defer b.applying.Unlock()
	b.mu.Lock()
	all := make([]note, 0, len(b.inherited))
	for _, n := range b.inherited {
		all = append(all, n)
	}
	b.mu.Unlock()
	for _, n := range all {
		b.lose(n, fmt.Sprintf("the program could not be attached to interface %s", n.Offer.Interface))
		if b.hooks[n.Offer.Interface] == nil {
			_ = hook.RemoveKept(b.options.Keep.folder(n.Offer.Interface)) // the next process that attaches there removes it as well
		}
	}
}

// lives reports whether the holder's process is alive.
func (a *awaited) lives() bool {
	began, err := beganAt(a.Holder.PID)
	return err == nil && began == a.Began
}

func beganAt(pid int) (uint64, error) {
	stat, err := process.ReadStat(pid)
	if err != nil {
		return 0, err
	}
	if s := stat.State(); s == "Z" || s == "X" {
		return 0, fmt.Errorf("process %d has ended", pid)
	}
	return stat.Number(process.StartTicks)
}

// over ends an awaited lease, unless it has been resumed or is ending already.
func (b *Broker) over(a *awaited, word, why string) {
	b.mu.Lock()
	if a.ends || b.awaited[a.Number] != a {
		b.mu.Unlock()
		return
	}
	a.ends = true
	h := b.hooks[a.Offer.Interface]
	b.mu.Unlock()
	close(a.ending.ending)
	err := a.lease.Close()
	if h != nil {
		err = errors.Join(err, b.forget(a.Number, h.Hook))
	}
	b.mu.Lock()
	delete(b.awaited, a.Number)
	b.lost[a.Number] = lost{a.Offer.Name, why}
	if o := b.offers[a.Offer.Name]; o != nil {
		o.ended[word]++
		o.lastEnd, o.previous = word, a.Holder
		o.past.all.Unknown++ // the sockets had the rest of the counters
		if err != nil {
			o.past.all.Failed++
		}
	}
	b.mu.Unlock()
	close(a.ending.over)
}

// reclaim makes a session the holder of a lease of the previous broker. It gets copies of the files as they belong to the lease.
func (b *Broker) reclaim(s *session, number uint64, files []int) error {
	marks, marksErr := xsk.MarksOf(files)
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.awaited[number]
	if a == nil || a.ends {
		return b.notThere(number)
	}
	o := b.offers[a.Offer.Name]
	switch {
	case a.Holder.PID != s.peer.PID || a.Holder.UID != s.peer.UID || a.Began != s.peer.began:
		return refuse(proto.EndRefused, "resume the lease of %s: %s asks, but another process had the lease; ask for a lease of your own", a.Offer.Name, s.peer)
	case marksErr != nil || !reflect.DeepEqual(marks, a.Marks):
		return refuse(proto.EndProtocol, "resume the lease of %s: the files are not the files of Grant (%v); send copies of the memory and the sockets of Grant, in their order", a.Offer.Name, marksErr)
	case o == nil:
		return refuse(proto.EndBusy, "resume the lease of %s: the broker has just started; try again", a.Offer.Name)
	case !o.allows(s.peer.Identity):
		return refuse(proto.EndRefused, "resume the lease of %s: no rule allows %s any more; add a rule for it to the offer", a.Offer.Name, s.peer)
	}
	delete(b.awaited, number)
	s.ending, s.hook, s.lease, s.number, s.since, s.offered, o.holder = a.ending, b.hooks[a.Offer.Interface].Hook, a.lease, number, a.Since, o, s
	return nil
}

// notThere returns the reason why a lease cannot be resumed. The caller holds mu.
func (b *Broker) notThere(number uint64) error {
	if l, is := b.lost[number]; is {
		return refuse(proto.EndRevoked, "resume the lease of %s: %s; ask for a new one", l.offer, l.why)
	}
	if n, is := b.inherited[number]; is {
		return refuse(proto.EndBusy, "resume the lease of %s: the program is not attached to interface %s yet; try again", n.Offer.Name, n.Offer.Interface)
	}
	return refuse(proto.EndRevoked, "resume lease %d: an earlier broker ended the lease, or did not leave it to its successor; ask for a new lease", number)
}

// inTheWay returns an awaited lease that has a queue of an offer. If the lease's own holder asks for a new one, the awaited lease
// ends. The caller holds mu.
func (b *Broker) inTheWay(s *session, o *offered) *awaited {
	for _, a := range b.awaited {
		if a.Offer.Name != o.Name && !a.Offer.shares(o.Offer) {
			continue
		}
		if a.Holder.PID == s.peer.PID && a.Began == s.peer.began {
			b.running.Go(func() { b.over(a, endedClosed, "its holder has asked for a new one") })
		}
		return a
	}
	return nil
}

// Leave ends the broker, and leaves its leases to the next broker with the same Keep. Without Keep it does the same as Close.
func (b *Broker) Leave() error {
	if b.options.Keep == nil {
		return b.Close()
	}
	b.applying.Lock()
	defer b.applying.Unlock()
	b.mu.Lock()
	b.closed = true
	close(b.left)
	b.mu.Unlock()
	close(b.ends)
	errs := []error{b.listener.Close()}
	b.running.Wait()
	for _, h := range b.hooks {
		if h.Adopted() {
			errs = append(errs, h.Leave())
		} else {
			errs = append(errs, h.Close())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("leave the leases of the broker at %s: %w", b.options.Socket, err)
	}
	return nil
}
