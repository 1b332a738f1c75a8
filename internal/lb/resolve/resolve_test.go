package resolve

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
)

// zone answers lookups in tests, and counts them.
type zone struct {
	mu      sync.Mutex
	replies map[Question]reply
	failed  map[Question]error
	asked   map[Question]int
}

func newZone() *zone {
	return &zone{replies: map[Question]reply{}, failed: map[Question]error{}, asked: map[Question]int{}}
}

func (z *zone) lookup(_ context.Context, q Question) (reply, error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.asked[q]++
	return z.replies[q], z.failed[q]
}

func (z *zone) set(q Question, ttl time.Duration, addresses ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	r := reply{ttl: ttl}
	for _, a := range addresses {
		r.addresses = append(r.addresses, netip.MustParseAddr(a))
	}
	z.replies[q], z.failed[q] = r, nil
}

func (z *zone) fail(q Question, err error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.failed[q] = err
}

func (z *zone) count(q Question) int {
	z.mu.Lock()
	defer z.mu.Unlock()
	n := z.asked[q]
	z.asked[q] = 0
	return n
}

var web = Question{"web.example.org", IPv4}

// bed is a follower of a zone.
type bed struct {
	*zone
	*Follower
	conditions *condition.Set
}

func newBed(t *testing.T, path string) bed {
	b := bed{zone: newZone(), conditions: &condition.Set{}}
	b.open(t, path)
	return b
}

func (b *bed) open(t *testing.T, path string) {
	b.Follower = Open(Options{Path: path, Log: slog.New(slog.DiscardHandler), Conditions: b.conditions, lookup: b.lookup})
	t.Cleanup(b.Close)
}

func (b *bed) requires(t *testing.T, when, addresses, leaving string) {
	t.Helper()
	synctest.Wait()
	a := b.Answer(web)
	if got, want := fmt.Sprint(a.Addresses, a.Leaving), "["+addresses+"] ["+leaving+"]"; got != want {
		t.Errorf("%s: %s, want %s", when, got, want)
	}
}

func (b *bed) hasChanged(t *testing.T, when string, want bool) {
	t.Helper()
	synctest.Wait()
	is := false
	select {
	case <-b.Changed():
		is = true
	default:
	}
	if is != want {
		t.Errorf("%s: changed is %v", when, is)
	}
}

func (b *bed) condition() string {
	for _, c := range b.conditions.List() {
		return c.Code + " " + c.Subject + ": " + c.Text
	}
	return ""
}

// TestFollow: a name is looked up again when its TTL has passed. Failures keep the last answer, with a condition, and
// are retried. An address that is not in the answer any more leaves after a while, unless it comes back.
func TestFollow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, filepath.Join(t.TempDir(), "names"))
		b.set(web, 20*time.Second, "10.0.0.2", "10.0.0.3")
		b.Follow([]Question{web})
		b.requires(t, "at first", "10.0.0.2 10.0.0.3", "")
		b.hasChanged(t, "at first", true)
		time.Sleep(61 * time.Second)
		if n := b.count(web); n != 4 {
			t.Errorf("asked %d times in 61 s, want 4", n)
		}
		b.hasChanged(t, "with the same answers", false)

		b.fail(web, errors.New("resolver 10.0.0.53: SERVFAIL"))
		time.Sleep(20 * time.Second)
		b.requires(t, "after a failure", "10.0.0.2 10.0.0.3", "")
		want := "name_not_resolved web.example.org (A): look up web.example.org (A): resolver 10.0.0.53: SERVFAIL; its last addresses stay in force: 10.0.0.2, 10.0.0.3"
		if got := b.condition(); got != want {
			t.Errorf("the condition is %q, want %q", got, want)
		}
		b.count(web)
		time.Sleep(time.Hour)
		if n := b.count(web); n < 115 || n > 125 {
			t.Errorf("asked %d times in an hour of failures, want one in 30 s", n)
		}
		b.requires(t, "after an hour of failures", "10.0.0.2 10.0.0.3", "")
		b.hasChanged(t, "after failures", false)

		b.set(web, time.Hour, "10.0.0.3", "10.0.0.4")
		time.Sleep(30 * time.Second)
		b.requires(t, "with another answer", "10.0.0.3 10.0.0.4", "10.0.0.2")
		b.hasChanged(t, "with another answer", true)
		if got := b.condition(); got != "" {
			t.Errorf("the condition is %q", got)
		}
		time.Sleep(Linger)
		b.requires(t, "later", "10.0.0.3 10.0.0.4", "")
		b.hasChanged(t, "later", true)

		b.set(web, time.Minute, "10.0.0.3")
		time.Sleep(time.Hour + Linger)
		b.set(web, time.Minute, "10.0.0.3", "10.0.0.9")
		time.Sleep(61 * time.Second)
		b.set(web, time.Minute, "10.0.0.3")
		time.Sleep(61 * time.Second)
		b.requires(t, "without one", "10.0.0.3", "10.0.0.9")
		b.set(web, time.Minute, "10.0.0.3", "10.0.0.9")
		time.Sleep(61 * time.Second)
		b.requires(t, "when it is back", "10.0.0.3 10.0.0.9", "")
		b.set(web, time.Minute)
		time.Sleep(61 * time.Second)
		b.requires(t, "without all", "", "10.0.0.3 10.0.0.9")

		b.count(web)
		b.Follow(nil)
		time.Sleep(time.Hour)
		if n := b.count(web); n != 0 {
			t.Errorf("a name that is not followed any more was asked for %d times", n)
		}
	})
}

// TestAwait: a wait for an unknown name ends with an answer, a failure, or the end of its time.
func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t, filepath.Join(t.TempDir(), "names"))
		slow, hold := Question{"slow.example.org", IPv6}, make(chan struct{})
		b.Follower.options.lookup = func(ctx context.Context, q Question) (reply, error) {
			if q == slow {
				select {
				case <-hold:
				case <-ctx.Done():
				}
			}
			return b.lookup(ctx, q)
		}
		b.set(web, time.Hour, "10.0.0.2")
		b.fail(slow, errors.New("no answer within 5s"))
		all := []Question{web, slow}
		b.Follow(all)
		short, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		began := time.Now()
		b.Await(short, all)
		if waited := time.Since(began); waited != 2*time.Second {
			t.Errorf("waited %s", waited)
		}
		close(hold)
		b.Await(t.Context(), all)
		if got := b.condition(); !strings.Contains(got, "slow.example.org (AAAA): look up slow.example.org (AAAA): no answer within 5s; it has no address, so its backends are missing") {
			t.Errorf("the condition is %q", got)
		}
	})
}

// TestAnswersAreKept: the next process begins with the answers of this one, even if the DNS fails.
func TestAnswersAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "state", "names.json")
		b := newBed(t, path)
		b.set(web, time.Minute, "10.0.0.2", "10.0.0.3")
		b.Follow([]Question{web})
		synctest.Wait()
		b.set(web, time.Minute, "10.0.0.2")
		time.Sleep(time.Minute)
		b.requires(t, "before", "10.0.0.2", "10.0.0.3")
		b.Close()

		b.fail(web, errors.New("SERVFAIL"))
		b.open(t, path)
		b.Follow([]Question{web})
		b.Await(t.Context(), []Question{web}) // it is known
		b.requires(t, "in the next process", "10.0.0.2", "10.0.0.3")
		time.Sleep(Linger)
		b.requires(t, "later", "10.0.0.2", "")
		b.Follow(nil)
		b.Close()

		b.open(t, path)
		b.Follow([]Question{web})
		b.requires(t, "after a process that forgot it and ended before Save", "10.0.0.2", "")
		b.Follow(nil)
		b.Save()
		b.Close()
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("without names there is still a file: %v", err)
		}

		if err := os.WriteFile(path, []byte("[{"), 0o600); err != nil {
			t.Fatal(err)
		}
		b.set(web, time.Minute, "10.0.0.7")
		b.open(t, path)
		b.Follow([]Question{web})
		b.requires(t, "with a damaged file", "10.0.0.7", "")
	})
}
