package net

import (
	"fmt"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestRenameMovesNoConnection: services that are renamed, or split, or merged into one that takes over a frontend, keep
// the connections whose frontend and backend stay.
func TestRenameMovesNoConnection(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm, Backends: 3})
	file := b.file(settings{})
	b.write(file)
	b.start()
	sessions := b.open(t, 20)

	out := b.reload(strings.NewReplacer("name: web", "name: site", "name: dns", "name: names").Replace(file))
	b.goOn(t, "after the services got other names", sessions)
	if !strings.Contains(out, "takes over the flows of service web") {
		t.Errorf("the reload does not say what becomes of flows:\n%s", out)
	}

	// One for each family, with other names again; then back to one.
	split := file
	begin, end := strings.Index(split, "  - name: web"), strings.Index(split, "  - name: dns")
	parts := ""
	for i, vip := range vips {
		parts += fmt.Sprintf("  - name: part%d\n    address: %q\n    port: 80\n    protocol: tcp\n    backends:\n%s", i, vip, b.backends(nil, 8080))
	}
	b.reload(split[:begin] + parts + split[end:])
	b.goOn(t, "after a split", sessions)

	b.kill()
	b.write(strings.ReplaceAll(split[:begin]+parts+split[end:], "name: part", "name: piece"))
	b.start()
	b.goOn(t, "after a start with other names", sessions)

	// The reload names the flows that it has to cut.
	out = b.reload(b.file(settings{backends: []int{1}}))
	if !strings.Contains(out, "open flow") || !strings.Contains(out, "of backend "+at(b.Backends[1].Addr4(), 8080)+" end with it") {
		t.Errorf("the reload does not say what it has cut:\n%s", out)
	}
	b.logged(t, "about to change the services: ", 1)
}
