package net

import (
	"fmt"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestUnreachableBackendDelaysOneChange: the change that brings a backend waits for the way to it.
// Those after that do not, though nobody answers there, and one that brings another waits for that
// alone.
func TestUnreachableBackendDelaysOneChange(t *testing.T) {
	b := newBed(t, lab.Options{Backends: 2})
	dead := func(hosts ...int) string {
		text := "  - name: dead\n    address: 192.0.2.99\n    port: 80\n    protocol: tcp\n    backends:\n"
		bytes := b.Backends[0].Addr4().As4()
		for _, host := range hosts {
			text += fmt.Sprintf("      - {address: %d.%d.%d.%d}\n", bytes[0], bytes[1], bytes[2], host)
		}
		return text
	}
	waits := func(wanted ...string) {
		t.Helper()
		var lines []string
		for line := range strings.Lines(b.daemon.log()) {
			if strings.Contains(line, "cannot be reached yet") {
				lines = append(lines, line)
			}
		}
		if len(lines) != len(wanted) {
			t.Fatalf("the daemon waited %d times in vain, want %d:\n%s", len(lines), len(wanted), b.daemon.log())
		}
		for i, address := range wanted {
			if !strings.Contains(lines[i], address) || strings.Count(lines[i], ".25") != 1 {
				t.Errorf("it waited for others than %s: %s", address, lines[i])
			}
		}
	}
	b.write(b.file(settings{more: dead(250)}))
	b.start()
	waits(".250")
	for i := range 3 {
		if code, out := b.shunt("backend", "weight", b.Backends[0].Addr4().String(), fmt.Sprint(i+2), "--socket", b.socket); code != 0 {
			t.Fatalf("exit code %d: %s", code, out)
		}
	}
	b.reload(b.file(settings{backends: []int{1}, more: dead(250)}))
	waits(".250")
	b.reload(b.file(settings{backends: []int{1}, more: dead(250, 251)}))
	waits(".250", ".251")
	b.reload(b.file(settings{backends: []int{1}}))
	b.reload(b.file(settings{backends: []int{1}, more: dead(250)}))
	waits(".250", ".251", ".250") // gone meanwhile, so it is new again
}
