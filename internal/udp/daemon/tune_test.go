package daemon_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"golang.org/x/sys/unix"
)

// The interrupts of an interface are off while an entry has busy_poll, and the values from before come back: at a
// reload, from the successor of a daemon that was killed, from `shunt detach` after one, and at the end.
func TestBusyPollIsPutBack(t *testing.T) {
	const plain = all
	polled := strings.TrimSuffix(all, "}") + ", busy_poll: 200us}"
	b := newBed(t, polled)
	sys := t.TempDir()
	b.Must(b.net.Server.Run(func() error { return unix.Mount("sysfs", sys, "sysfs", 0, "") }))
	t.Cleanup(func() { b.Must(unix.Unmount(sys, 0)) })
	is := func(when, flush, polls string) {
		t.Helper()
		for file, want := range map[string]string{"gro_flush_timeout": flush, "napi_defer_hard_irqs": polls} {
			if text, err := os.ReadFile(filepath.Join(sys, "class/net/eth0", file)); err != nil || strings.TrimSpace(string(text)) != want {
				t.Errorf("%s, %s is %q, want %s: %v", when, file, text, want, err)
			}
		}
	}
	b.Must(os.WriteFile(filepath.Join(sys, "class/net/eth0/gro_flush_timeout"), []byte("7000"), 0))
	instance := filepath.Base(b.Folder)

	b.run(sysVariable + "=1")
	is("while it runs", "200000", "2")
	told := func(polls uint32) {
		t.Helper()
		b.Is("busy polling is told as configured and as in force", func(st *shuntv1.GetStatusResponse) bool {
			l := lease(st, "feed")
			return l.BusyPoll.AsDuration() == 200*time.Microsecond && l.Interrupts.GetFailed() == "" &&
				l.Interrupts.GetFlushTimeout().AsDuration() == 200*time.Microsecond && l.Interrupts.GetEmptyPolls() == polls
		})
	}
	told(2)
	deferred := filepath.Join(sys, "class/net/eth0/napi_defer_hard_irqs")
	b.Must(os.WriteFile(deferred, []byte("0"), 0)) // somebody switches the interrupts on
	told(0)
	b.Must(os.WriteFile(deferred, []byte("2"), 0))
	b.work("feed", 0)
	b.until("x")
	b.write(plain)
	b.Reload()
	is("after a reload", "7000", "0")
	b.write(polled)
	b.Reload()
	is("after another reload", "200000", "2")
	nodetest.Kill(b.Process)
	is("after kill -9", "200000", "2")

	b.write(plain)
	b.run(sysVariable + "=1")
	is("with a successor", "7000", "0")
	b.write(polled)
	b.Reload()
	nodetest.Kill(b.Process)
	is("after kill -9", "200000", "2")
	detach := b.Spawn(b.Self(), sysVariable+"=1", detachVariable+"="+instance)
	<-detach.Ended
	if log := detach.Log(); !strings.Contains(log, "restored the interrupts from before busy polling") {
		t.Errorf("shunt detach says %q", log)
	}
	is("after shunt detach", "7000", "0")

	b.run(sysVariable + "=1")
	is("once more", "200000", "2")
	nodetest.Kill(b.Process)
	uninstall := b.Spawn(b.Self(), sysVariable+"=1", leftVariable+"="+instance)
	<-uninstall.Ended
	if log := uninstall.Log(); !strings.Contains(log, "left: [eth0] <nil>\nremoved: <nil>\nleft then: [] <nil>\n") {
		t.Errorf("what shunt uninstall does: %q", log)
	}
	is("after shunt uninstall", "7000", "0")
	if left, _ := filepath.Glob("/run/shunt/" + instance + ".busypoll*"); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// Without a /sys that shows the interface a lease works, and the reason is reported.
func TestBusyPollCannotBe(t *testing.T) {
	b := newBed(t, strings.TrimSuffix(all, "}")+", busy_poll: 200us}")
	b.run()
	b.work("feed", 0)
	b.until("x")
	b.Is("the condition", func(st *shuntv1.GetStatusResponse) bool {
		const why = "does not show this network namespace"
		return strings.Contains(nodetest.Condition(st, "udp_busy_poll_off", "eth0"), why) && strings.Contains(lease(st, "feed").Interrupts.GetFailed(), why)
	})
}
