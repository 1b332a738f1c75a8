package daemon

import (
	"bytes"
	"context"
	"errors"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"log/slog"
	"strings"
	"testing"
)

// TestTakenPorts: what is listed is reserved. A list that fails leaves what was reserved, and says so. Where nobody lists, nothing is reserved, also of
// a process before.
func TestTakenPorts(t *testing.T) {
	var out bytes.Buffer
	var reserved [][]store.SourcePort
	var fails error
	p := takenPorts{
		list:    func() ([]store.SourcePort, error) { return []store.SourcePort{{Protocol: 6}}, fails },
		reserve: func(ports []store.SourcePort) error { reserved = append(reserved, ports); return nil },
		log:     slog.New(slog.NewTextHandler(&out, nil)),
	}
	if err := p.look(); err != nil || len(reserved) != 1 || len(reserved[0]) != 1 {
		t.Errorf("it reserved %v, %v", reserved, err)
	}
	fails = errors.New("the kernel has no such list")
	if err := p.look(); err != nil || len(reserved) != 1 || !strings.Contains(out.String(), "the kernel has no such list") {
		t.Errorf("it reserved %v, %v, and said %q", reserved, err, out.String())
	}
	fails = nil
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p.run(ctx) // looks before it waits
	if len(reserved) != 2 {
		t.Errorf("it reserved %v", reserved)
	}
	reserved, fails = reserved[:1], errors.New("the table is full")
	p.list = nil
	if err := p.look(); err != nil || len(reserved) != 2 || reserved[1] != nil {
		t.Errorf("it reserved %v, %v", reserved, err)
	}
	p.reserve = func([]store.SourcePort) error { return fails }
	if err := p.look(); !errors.Is(err, fails) {
		t.Errorf("a table without room: %v", err)
	}
}
