package net

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// closing is a file whose services end the flows of backends that are down.
func closing(file string) string {
	return strings.NewReplacer("  - name: web\n", "  - name: web\n    on_down: close\n", "  - name: dns\n", "  - name: dns\n    on_down: close\n").Replace(file)
}

// isEnded sends a request on a connection that has been cut, and requires that the client gets a reset at once.
func (b *bed) isEnded(t *testing.T, s *session) {
	t.Helper()
	began := time.Now()
	_, err := s.get()
	if err == nil {
		t.Errorf("a connection with %s goes on", s.first.Backend)
	} else if errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) >= answerTimeout {
		t.Errorf("the client of a connection with %s was not told in %s: %v", s.first.Backend, time.Since(began), err)
	} else if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("the client of a connection with %s was told %v, not of a reset", s.first.Backend, err)
	}
}

// TestOnDownClose is a database that is no longer the primary: it runs, its machine goes on answering, and its check
// reports that clients must not use it. Their connections end, and others go on; a check that fails once ends none.
func TestOnDownClose(t *testing.T) {
	for _, attach := range []string{"native", "generic", "tc"} {
		t.Run(attach, func(t *testing.T) {
			b, w := healthBed(t)
			one, two := b.Backends[0], b.Backends[1]
			file := strings.ReplaceAll(b.healthFile("", ""), "attach: auto", "attach: "+attach)
			b.write(closing(file))
			b.start()
			b.isServed(t, "at start", one, two)
			sessions := b.open(t, 12)
			theirs, others := with(one.Name(), sessions)
			if len(theirs) == 0 || len(others) == 0 {
				t.Fatalf("%d connections are with one backend, %d with the other", len(theirs), len(others))
			}

			w.shut(t, one)
			b.logged(t, " ended with it: on_down is close", 1)
			b.downEverywhere(t, one)
			for _, s := range theirs {
				b.isEnded(t, s)
			}
			for _, s := range others {
				if err := b.alive(s); err != nil {
					t.Errorf("a connection with a backend that is up: %v", err)
				}
			}
			b.isServed(t, "with one down", two)
			if c := b.status().condition("flows_closed"); !strings.Contains(c, "web") || !strings.Contains(c, " ended with it: on_down is close") {
				t.Errorf("the condition is %q", c)
			}

			// No backend is left: shunt itself resets the clients' connections.
			w.shut(t, two)
			b.downEverywhere(t, two)
			for _, s := range others {
				b.isEnded(t, s)
			}

			w.open(t, one, two)
			b.isServed(t, "with both up again", one, two)
			kept := b.open(t, 6)
			b.reload(file)
			w.shut(t, one)
			b.downEverywhere(t, one)
			for _, s := range kept {
				if err := b.alive(s); err != nil {
					t.Errorf("on_down: keep: %v", err)
				}
			}
			// The edit itself ends the connections that stayed.
			b.reload(closing(file))
			theirs, _ = with(one.Name(), kept)
			for _, s := range theirs {
				b.isEnded(t, s)
			}
		})
	}
}

// TestOnDownCloseWithDirectReturn: the client's next packet goes to another backend, which resets it.
func TestOnDownCloseWithDirectReturn(t *testing.T) {
	b, file, _ := drainBed(t, "dsr-ipip")
	vip := directVIPs(0)[0]
	b.reload(strings.Replace(file(), "    forwarding: dsr-ipip\n", "    forwarding: dsr-ipip\n    on_down: close\n", 1))
	sessions := b.sessionsOf(t, vip, 64)
	b.set(t, "health", "b2", "down")
	theirs, others := with("b2", sessions)
	if len(theirs) == 0 {
		t.Fatal("no connection is with the backend that goes down")
	}
	for _, s := range theirs {
		b.isEnded(t, s)
	}
	for _, s := range others {
		if err := b.alive(s); err != nil {
			t.Errorf("a connection with a backend that is up: %v", err)
		}
	}
}
