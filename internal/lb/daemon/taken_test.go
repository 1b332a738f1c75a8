package daemon

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
)

// TestTakenPorts: listed ports are reserved. A list that fails leaves the earlier ports reserved, and a table without room stops nothing: both are
// logged once. Without a list no port is reserved, and ports that an earlier process reserved are given back.
func TestTakenPorts(t *testing.T) {
	var out bytes.Buffer
	var reserved [][]store.SourcePort
	var unlisted, unreserved error
	p := takenPorts{
		list:    func() ([]store.SourcePort, error) { return []store.SourcePort{{Protocol: 6}}, unlisted },
		reserve: func(ports []store.SourcePort) error { reserved = append(reserved, ports); return unreserved },
		log:     slog.New(slog.NewTextHandler(&out, nil)),
	}
	if p.taking(); len(reserved) != 1 || len(reserved[0]) != 1 || out.Len() > 0 {
		t.Errorf("it reserved %v, and said %q", reserved, out.String())
	}
	says := func(what string, tries int) {
		t.Helper()
		out.Reset()
		for range 2 {
			p.look()
		}
		if n := strings.Count(out.String(), what); n != 1 || strings.Count(out.String(), "\n") != 1 {
			t.Errorf("it says %q %d times, want once: %q", what, n, out.String())
		}
		if len(reserved) != tries {
			t.Errorf("it has tried to reserve %d times, want %d", len(reserved), tries)
		}
	}
	unlisted = errors.New("the kernel has no such list")
	says("cannot list the source ports", 1)
	unlisted, unreserved = nil, unix.E2BIG
	says("cannot reserve all source ports", 3)
	unreserved = nil
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if p.run(ctx); len(reserved) != 4 || p.said != "" { // looks before it waits
		t.Errorf("it has tried to reserve %d times, and what went wrong last is %q", len(reserved), p.said)
	}
	p.list, unreserved = nil, errors.New("the table is locked")
	p.taking() // nothing to list
	says("cannot give back the source ports", 6)
	unreserved = nil
	p.run(t.Context()) // once, when it has succeeded
	if len(reserved) != 7 || reserved[6] != nil {
		t.Errorf("it reserved %v", reserved)
	}
}
