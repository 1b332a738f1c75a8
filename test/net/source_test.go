package net

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/node"
)

// A shunt process with sourceVariable has a source beside the configuration file: another file
// of that format, of which it takes the services alone, whenever its content changes. An empty file
// withdraws all of them.
const sourceVariable = "SHUNT_NET_SOURCE"

// becomeDaemon makes this process `shunt run` with another source, if it is to be.
func becomeDaemon() {
	if path := os.Getenv(sourceVariable); path != "" && len(os.Args) > 1 && os.Args[1] == "run" {
		os.Exit(runWithSource(path))
	}
}

// runWithSource knows the options that launch gives, and returns the exit code.
func runWithSource(path string) int {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	balancer := daemon.Product(daemon.Options{Sources: []daemon.Source{{Name: "second", Run: func(ctx context.Context, replace func([]model.Service) error) {
		follow(ctx, path, func(services []model.Service) {
			if err := replace(services); err != nil {
				log.Error("second source refused", "error", err)
			}
		})
	}}}})
	options := node.Options{Log: log, Products: []node.Product{balancer}}
	flags := flag.NewFlagSet("run", flag.ExitOnError)
	flags.StringVar(&options.ConfigPath, "config", "", "")
	flags.StringVar(&options.Instance, "instance", "", "")
	flags.StringVar(&options.Socket, "socket", "", "")
	_ = flags.Parse(os.Args[2:]) // exits
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := node.Run(ctx, options); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// follow gives the services of a file each time that it has others, until ctx ends.
func follow(ctx context.Context, path string, changed func([]model.Service)) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var last []byte
	for {
		text, err := os.ReadFile(path)
		if err == nil && !bytes.Equal(text, last) {
			var loaded model.Config
			if len(text) > 0 {
				var faults []config.Fault
				if loaded, faults, err = file.Load(path); err != nil || config.HasErrors(faults) {
					panic(fmt.Sprint("the test's own file has faults: ", err, faults))
				}
			}
			last = text
			changed(loaded.Services)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// A service that is not from the file is as good as one that is: the program that its forwarding
// needs is attached, it has its slots and is announced, a backend of it can be drained, status and
// list show it, the service manager hears of it, and a reload of the file neither takes it away nor takes it over. The file's own
// services go on beside all that.
func TestSecondSource(t *testing.T) {
	b := newDirectBed(t, lab.Options{Layout: lab.OneArm, VIPOnLink: true, MTU: roomy, Backends: 3}, 2)
	second := directVIPs(1)
	b.ownByHand(second, b.Backends...)
	path := b.path + ".second"
	m := newManager(t)
	b.env = []string{sourceVariable + "=" + path, "NOTIFY_SOCKET=" + m.conn.LocalAddr().String()}
	says := func(services string) { t.Helper(); b.replaceFile(path, services) }
	edge := fmt.Sprintf("interfaces: [{name: lo}]\nservices:\n  - name: edge\n    address: [%s, %q]\n    port: [80, 53]\n    protocol: [tcp, udp]\n    forwarding: dsr-l2\n    announce: l2\n    backends:\n%s",
		second[0], second[1], b.backends(nil, 0))
	nat := b.file(settings{attach: "native"})
	b.write(nat)
	b.start()
	sessions := b.open(t, 2)

	says(edge)
	b.awaits(b.daemon, `msg="services replaced" source=second`)
	m.has(t, "STATUS=forwarding 3 services")
	eventually(t, 10*time.Second, "announcement", func() error { return b.announces(second) })
	b.edgeIsServed(t, "taken over")
	for _, vip := range second {
		if got, want := b.resolved(t, vip), b.Balancer.Interfaces()[0].MAC.String(); got != want {
			t.Errorf("the client resolved %s to %s, want the balancer's %s", vip, got, want)
		}
	}

	b.drain(t, b.Backends[0])
	for _, vip := range second {
		if seen := b.fresh(t, vip); seen[b.Backends[0].Name()] > 0 || len(seen) != 2 {
			t.Errorf("with %s drained, %s is answered by %v", b.Backends[0].Name(), vip, seen)
		}
	}
	if line := b.list(t)[b.Backends[0].Addr4().String()]; line.State != "draining" || strings.Join(line.Services, " ") != "edge" {
		t.Errorf("a drained backend of the second source is listed as %+v", line)
	}

	if out := b.reload(strings.Replace(nat, "port: 80\n", "port: 81\n", 1)); strings.Contains(out, "edge") {
		t.Errorf("the file's reload says of the other source:\n%s", out)
	}
	b.undrain(t, b.Backends[0])
	b.reload(nat)
	b.edgeIsServed(t, "after the file was reloaded")

	b.write(nat + "  - {name: edge, address: 192.0.2.77, port: 80, backends: [{address: 10.0.0.2}]}\n")
	code, out := b.shunt("reload", "--socket", b.socket)
	if code == 0 || !strings.Contains(out, `service "edge" belongs to source "second"`) {
		t.Errorf("a file with the other source's service: exit code %d\n%s", code, out)
	}
	says(strings.Replace(edge, "name: edge", "name: web", 1))
	b.awaits(b.daemon, "second source refused")
	if log := b.daemon.log(); !strings.Contains(log, `service \"web\" belongs to source \"file\"`) {
		t.Errorf("the source has not heard why it was refused:\n%s", log)
	}
	b.edgeIsServed(t, "after both were refused")

	b.write(nat)
	says("")
	eventually(t, 10*time.Second, "withdrawal", func() error {
		for _, s := range b.status().Services {
			if s.Name == "edge" {
				return fmt.Errorf("%+v", s)
			}
		}
		return nil
	})
	m.has(t, "STATUS=forwarding 2 services")
	b.forget(t)
	for _, vip := range second {
		_ = b.tryUDP(at(vip, 53)) // for the look-up
		if got := b.resolved(t, vip); got != "" {
			t.Errorf("the client resolved %s to %s after it was withdrawn", vip, got)
		}
	}
	b.goOn(t, "after all that", sessions)
}

// edgeIsServed reports whether all backends of the second source take flows, and are shown.
func (b *bed) edgeIsServed(t *testing.T, when string) {
	t.Helper()
	for _, vip := range directVIPs(1) {
		if seen := b.fresh(t, vip); len(seen) != len(b.Backends) {
			t.Errorf("%s, %s is answered by %v", when, vip, seen)
		}
	}
	for _, s := range b.status().Services {
		if s.Name != "edge" {
			continue
		}
		for _, backend := range s.Backends {
			if backend.State != "active" || backend.Slots == 0 {
				t.Errorf("%s, status shows %+v", when, backend)
			}
		}
		return
	}
	t.Errorf("%s, status does not show the service", when)
}
