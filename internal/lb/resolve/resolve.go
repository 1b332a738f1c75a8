// Package resolve follows the names of backends in the DNS.
//
//	services with names ─► Follow ─► a lookup for each name and family, again when its TTL has passed
//	                                       │ answers, kept on disk
//	services with addresses ◄── Expand ◄───┘ ─► Changed
//
// A lookup that fails changes nothing: the last answer stays. An address that an answer no longer has stays for a
// while, and takes no new flows.
package resolve

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/record"
)

// Family is a version of IP.
type Family int

// The families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// Question is a question to the DNS.
type Question struct {
	Name   string
	Family Family
}

// String returns "web.example.org (A)".
func (q Question) String() string {
	if q.Family == IPv4 {
		return q.Name + " (A)"
	}
	return q.Name + " (AAAA)"
}

// Answer is the knowledge about a name.
type Answer struct {
	Addresses []netip.Addr // in order
	// Leaving are addresses that the latest answers no longer have.
	Leaving []netip.Addr
}

const (
	// Linger is how long an address stays after the last answer that had it. Connections continue meanwhile,
	// and an answer that lacks some addresses by chance costs nothing.
	Linger = 10 * time.Minute
	// retryMin and retryMax limit the time between a failure and the next question, which doubles each time.
	retryMin, retryMax = time.Second, 30 * time.Second
	// lookupTime limits a look-up with all its attempts.
	lookupTime = time.Minute
)

// Options configure a Follower.
type Options struct {
	Path       string // of the file that keeps the answers
	Log        *slog.Logger
	Conditions *condition.Set
	// lookup replaces the DNS in tests.
	lookup func(context.Context, Question) (reply, error)
}

// Follower knows the present addresses of names. Its methods may be called from any goroutine.
type Follower struct {
	options Options
	changed chan struct{} // capacity 1
	running sync.WaitGroup

	mu    sync.Mutex
	names map[Question]*followed
}

// followed is the state of one question.
type followed struct {
	cancel  context.CancelFunc
	asked   chan struct{} // closed after the first lookup
	known   bool          // there has been an answer, perhaps to an earlier process
	current []netip.Addr
	leaving map[netip.Addr]time.Time // the time until which each address stays
}

// Open returns a follower with the answers that an earlier one has saved. If the file cannot be read, the error
// is logged and the DNS is asked.
func Open(options Options) *Follower {
	if options.lookup == nil {
		options.lookup = stub{path: ConfigPath}.lookup
	}
	f := &Follower{options: options, changed: make(chan struct{}, 1), names: map[Question]*followed{}}
	if err := f.load(); err != nil {
		options.Log.Warn("cannot read the saved addresses of names; the names are looked up again", "path", options.Path, "error", err)
	}
	return f
}

// Changed returns a channel that receives when the result of Answer may have changed.
func (f *Follower) Changed() <-chan struct{} { return f.changed }

func (f *Follower) notify() {
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

// Follow sets the names that are followed. Other names are dropped, and stay in the file until Save: a start
// that fails leaves the file unchanged.
func (f *Follower) Follow(questions []Question) {
	f.mu.Lock()
	defer f.mu.Unlock()
	wanted := map[Question]bool{}
	for _, q := range questions {
		wanted[q] = true
		name := f.names[q]
		if name == nil {
			name = &followed{leaving: map[netip.Addr]time.Time{}}
			f.names[q] = name
		}
		if name.cancel != nil {
			continue
		}
		ctx, cancel := context.WithCancel(context.Background())
		name.cancel, name.asked = cancel, make(chan struct{})
		f.running.Go(func() { f.follow(ctx, q, name) })
	}
	for q, name := range f.names {
		if !wanted[q] {
			if name.cancel != nil {
				name.cancel()
			}
			delete(f.names, q)
			f.options.Conditions.Clear(condition.NameNotResolved, q.String())
		}
	}
}

// Save saves the answers of the names that are followed.
func (f *Follower) Save() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.save()
}

// Await waits until each question has an answer, or has been asked once without success; ctx limits the wait.
func (f *Follower) Await(ctx context.Context, questions []Question) {
	for _, q := range questions {
		f.mu.Lock()
		name := f.names[q]
		wait := name != nil && name.cancel != nil && !name.known
		f.mu.Unlock()
		if !wait {
			continue
		}
		select {
		case <-name.asked:
		case <-ctx.Done():
			return
		}
	}
}

// Answer returns the knowledge about a name.
func (f *Follower) Answer(q Question) Answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	name := f.names[q]
	if name == nil {
		return Answer{}
	}
	return Answer{Addresses: slices.Clone(name.current), Leaving: slices.SortedFunc(maps.Keys(name.leaving), netip.Addr.Compare)}
}

// Close ends all lookups.
func (f *Follower) Close() {
	f.mu.Lock()
	for _, name := range f.names {
		if name.cancel != nil {
			name.cancel()
		}
	}
	f.mu.Unlock()
	f.running.Wait()
}

// follow looks a name up repeatedly.
func (f *Follower) follow(ctx context.Context, q Question, name *followed) {
	retry := retryMin
	first := sync.OnceFunc(func() { close(name.asked) })
	defer first()
	for {
		limited, cancel := context.WithTimeout(ctx, lookupTime)
		r, err := f.options.lookup(limited, q)
		cancel()
		if ctx.Err() != nil {
			return
		}
		wait := r.ttl
		if err != nil {
			wait, retry = retry, min(2*retry, retryMax)
		} else {
			retry = retryMin
		}
		wait = f.take(ctx, q, name, r, err, wait)
		first()
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// take records the result of a look-up, and returns the time until the next one: earlier than wait if an
// address is to expire.
func (f *Follower) take(ctx context.Context, q Question, name *followed, r reply, err error, wait time.Duration) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ctx.Err() != nil {
		return wait // it is forgotten
	}
	now := time.Now()
	before, isFirst := name.text(), err == nil && !name.known
	if err != nil {
		f.options.Conditions.Raise(condition.Condition{Code: condition.NameNotResolved, Subject: q.String(), Text: name.fault(q, err)})
	} else {
		f.options.Conditions.Clear(condition.NameNotResolved, q.String())
		for _, a := range name.current {
			name.leaving[a] = now.Add(Linger)
		}
		for _, a := range r.addresses {
			delete(name.leaving, a)
		}
		name.current, name.known = r.addresses, true
	}
	maps.DeleteFunc(name.leaving, func(_ netip.Addr, until time.Time) bool { return !until.After(now) })
	if after := name.text(); after != before || isFirst {
		f.options.Log.Info("the addresses of a name have changed", "name", q.String(), "before", before, "now", after, "ttl", r.ttl)
		f.save()
		f.notify()
	}
	for _, until := range name.leaving {
		wait = min(wait, until.Sub(now))
	}
	return wait
}

// fault describes a failed look-up and its effect.
func (n *followed) fault(q Question, err error) string {
	text := fmt.Sprintf("look up %s: %v", q, err)
	if n.known {
		return text + "; its last addresses stay in force: " + n.text()
	}
	return text + "; it has no address, so its backends are missing"
}

// text returns the addresses in the form of messages.
func (n *followed) text() string {
	var all []string
	for _, a := range n.current {
		all = append(all, a.String())
	}
	for _, a := range slices.SortedFunc(maps.Keys(n.leaving), netip.Addr.Compare) {
		all = append(all, a.String()+" (leaving)")
	}
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}

// kept is an answer in the file.
type kept struct {
	Name    string                   `json:"name"`
	Family  Family                   `json:"family"`
	Current []netip.Addr             `json:"addresses"`
	Leaving map[netip.Addr]time.Time `json:"leaving,omitempty"`
}

func (f *Follower) load() error {
	var answers []kept
	if err := record.Read(f.options.Path, &answers); err != nil {
		return err
	}
	for _, k := range answers {
		if k.Leaving == nil {
			k.Leaving = map[netip.Addr]time.Time{}
		}
		f.names[Question{k.Name, k.Family}] = &followed{known: true, current: k.Current, leaving: k.Leaving}
	}
	return nil
}

// save saves the answers. Without the file the next process asks the DNS, so a failure is only logged. The
// caller holds mu.
func (f *Follower) save() {
	var answers []kept
	for q, name := range f.names {
		if name.known {
			answers = append(answers, kept{q.Name, q.Family, name.current, name.leaving})
		}
	}
	slices.SortFunc(answers, func(a, b kept) int { return strings.Compare(a.Name+fmt.Sprint(a.Family), b.Name+fmt.Sprint(b.Family)) })
	if err := write(f.options.Path, answers); err != nil {
		f.options.Log.Warn("cannot save the addresses of names: if the DNS fails at the next start, they are unknown", "path", f.options.Path, "error", err)
	}
}

// write replaces the file, or removes it if there are no answers.
func write(path string, answers []kept) error {
	if len(answers) == 0 {
		return record.Remove(path)
	}
	if err := record.OS.MkdirAll(filepath.Dir(path)); err != nil {
		return err
	}
	return record.Write(path, answers)
}
