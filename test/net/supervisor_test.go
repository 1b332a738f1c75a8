package net

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

// manager is the other end of sd_notify(3).
type manager struct {
	conn *net.UnixConn
	mu   sync.Mutex
	said []string
	last time.Time // of WATCHDOG=1
}

func newManager(t *testing.T) *manager {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	m := &manager{conn: conn}
	go func() {
		buffer := make([]byte, 4096)
		for {
			n, err := conn.Read(buffer)
			if err != nil {
				return
			}
			m.mu.Lock()
			if text := string(buffer[:n]); text == "WATCHDOG=1" {
				m.last = time.Now()
			} else {
				m.said = append(m.said, text)
			}
			m.mu.Unlock()
		}
	}()
	return m
}

// has waits for a message with all of these words, and forgets earlier ones.
func (m *manager) has(t *testing.T, words ...string) string {
	t.Helper()
	var found string
	eventually(t, 20*time.Second, strings.Join(words, " "), func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
	next:
		for i, text := range m.said {
			for _, word := range words {
				if !strings.Contains(text, word) {
					continue next
				}
			}
			found, m.said = text, m.said[i+1:]
			return nil
		}
		return fmt.Errorf("it was told %q", m.said)
	})
	return found
}

// lastPing is the time of the daemon's last WATCHDOG=1.
func (m *manager) lastPing() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

// supervised starts shunt as systemd would, with a watchdog.
func (b *bed) supervised(t *testing.T, m *manager, watchdog time.Duration, args ...string) {
	t.Helper()
	c := command(b.Balancer, append([]string{"run", "--config", b.path, "--instance", b.instance, "--socket", b.socket}, args...)...)
	c.Env = append(c.Env, "NOTIFY_SOCKET="+m.conn.LocalAddr().String(), fmt.Sprintf("WATCHDOG_USEC=%d", watchdog.Microseconds()))
	b.daemon = starts(b.t, c)
}

// TestNotify checks the messages to the service manager.
func TestNotify(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	m := newManager(t)
	b.write(b.file(settings{}))
	b.supervised(t, m, time.Minute, "--on-exit", "drain")
	m.has(t, "READY=1", "STATUS=forwarding 2 services")
	eventually(t, 10*time.Second, "a sign of life", func() error {
		if m.lastPing().IsZero() {
			return errors.New("none")
		}
		return nil
	})
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	for _, how := range []func(){
		func() { b.reload(b.file(settings{backends: []int{1}})) },
		func() { _ = b.daemon.command.Process.Signal(syscall.SIGHUP) },
	} {
		how()
		text := m.has(t, "RELOADING=1", "MONOTONIC_USEC=")
		_, number, _ := strings.Cut(text, "MONOTONIC_USEC=")
		var at int64
		if _, err := fmt.Sscan(number, &at); err != nil || at < now.Nano()/1000 {
			t.Errorf("a reload began at %d (%v), but that was before the test did: %q", at, err, text)
		}
		m.has(t, "READY=1")
	}
	sessions := b.open(t, 1)
	b.stopDraining(t)
	m.has(t, "STOPPING=1", "STATUS=waiting for flows to end", fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", (5*time.Minute+time.Minute).Microseconds()))
	sessions[0].Close()
}

// holdAttaching makes every attachment of the instance wait, until letGo or the end of the
// test.
func (b *bed) holdAttaching(t *testing.T) (letGo func()) {
	t.Helper()
	folder, err := os.Open("/sys/fs/bpf/shunt/" + b.instance)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = folder.Close() })
	flock := func(how int) {
		t.Helper()
		if err := unix.Flock(int(folder.Fd()), how); err != nil {
			t.Fatal(err)
		}
	}
	flock(unix.LOCK_EX)
	return func() { flock(unix.LOCK_UN) }
}

// TestWatchdogOfAStuckChange: the daemon notifies the watchdog only while its work goes on:
// not while a change hangs in the kernel, although the process runs, and again when the change
// goes on.
func TestWatchdogOfAStuckChange(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm})
	m := newManager(t)
	b.write(b.file(settings{attach: "native"}))
	b.supervised(t, m, patience*3*time.Second)
	m.has(t, "READY=1")
	letGo := b.holdAttaching(t)
	b.write(b.file(settings{attach: "generic"}))
	done := make(chan string)
	go func() {
		_, out := b.shunt("reload", "--socket", b.socket)
		done <- out
	}()
	b.awaits(b.daemon, "a part of the daemon makes no progress")
	stuck := m.lastPing()
	if b.status(); m.lastPing() != stuck {
		t.Error("the watchdog was told that a stuck daemon is alive")
	}
	letGo()
	t.Log(<-done)
	eventually(t, 20*time.Second, "signs of life after it has gone on", func() error {
		if m.lastPing() == stuck {
			return errors.New("none")
		}
		return nil
	})
}
