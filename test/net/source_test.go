package net

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
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

// A shunt process with sourceVariable has a source beside the configuration file: another file in the same format. It
// uses only the services of that file, whenever its content changes. An empty file withdraws all of them.
const sourceVariable = "SHUNT_NET_SOURCE"

// becomeDaemon makes this process `shunt run` with another source, if sourceVariable is set.
func becomeDaemon() {
	if len(os.Args) < 2 || os.Args[1] != "run" {
		return
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if path := os.Getenv(sourceVariable); path != "" {
		os.Exit(runWithSource(fileSource(path, log), log))
	}
	if path := os.Getenv(clusterVariable); path != "" {
		os.Exit(runWithSource(clusterSource(path, log), log))
	}
	if size := os.Getenv(fleetVariable); size != "" {
		os.Exit(runWithSource(fleetSource(size, log), log))
	}
}

// fileSource is the services of another file.
func fileSource(path string, log *slog.Logger) daemon.Source {
	return daemon.Source{
		Name:  "second",
		First: func() []model.Service { services, _ := servicesOf(path); return services },
		Run: func(ctx context.Context, declare func(daemon.Change) error) {
			follow(ctx, path, func(services []model.Service) {
				if err := declare(daemon.Change{Declare: services, Whole: true}); err != nil {
					log.Error("second source refused", "error", err)
				}
			})
		},
	}
}

// runWithSource accepts launch's options, and returns the exit code.
func runWithSource(source daemon.Source, log *slog.Logger) int {
	balancer := daemon.Product(daemon.Options{Sources: []daemon.Source{source}})
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

// follow passes on the services of a file whenever it changes, until ctx ends.
func follow(ctx context.Context, path string, changed func([]model.Service)) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var last []byte
	for {
		if services, text := servicesOf(path); text != nil && !bytes.Equal(text, last) {
			last = text
			changed(services)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// servicesOf are the services of a file, and its text; nil without one.
func servicesOf(path string) (services []model.Service, text []byte) {
	text, err := os.ReadFile(path)
	if err != nil || len(text) == 0 {
		return nil, text
	}
	loaded, faults, err := file.Load(path)
	if err != nil || config.HasErrors(faults) {
		panic(fmt.Sprint("the test's own file has faults: ", err, faults))
	}
	return loaded.Services, text
}

// TestSecondSource: a service of another source is equal to one of the file: the program that its forwarding needs is
// attached, it has its slots and is announced, a backend of it can be drained, status and list show it, the service
// manager is told of it, and a reload of the file neither removes it nor takes it over. The file's own services go on
// meanwhile.
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
	b.awaits(b.daemon, `msg="services changed" source=second`)
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
		_ = b.tryUDP(at(vip, 53)) // to cause a look-up
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

// TestSecondSourceRestarts: a start takes over the services of all sources in one step, so that connections to a
// service that is not in the file go on. If services of another source conflict with the file, they are left out, and
// no others.
func TestSecondSourceRestarts(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.TwoArm, Backends: 2})
	path := b.path + ".second"
	b.env = []string{sourceVariable + "=" + path}
	service := func(name string, port int) string {
		return fmt.Sprintf("  - {name: %s, address: %s, port: %d, backends: [{address: %s, port: 8080}]}\n", name, lab.VIP4, port, b.Backends[1].Addr4())
	}
	b.replaceFile(path, "interfaces: [{name: lo}]\nservices:\n"+service("edge", 8081)+service("web", 8082)+service("meets", 80))
	b.write(b.file(settings{attach: "native"}))
	b.start()
	one, err := b.Client.OpenSession(within(t, answerTimeout), "tcp", netip.AddrPort{}, at(lab.VIP4, 8081))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { one.Close() })
	s := &session{Session: one, address: at(lab.VIP4, 8081)}
	if s.first, err = s.get(); err != nil {
		t.Fatal(err)
	}
	for _, ends := range []string{"kill -9", "another kill -9"} {
		b.kill()
		b.start()
		if err := b.alive(s); err != nil {
			t.Errorf("after %s: %v", ends, err)
		}
	}
	log := b.daemon.log()
	for _, want := range []string{
		`msg="a service is left out" source=second service=web error="take over configuration of source \"second\": service \"web\" belongs to source \"file\"`,
		`service=meets error="take over configuration of source \"second\": frontend tcp 192.0.2.10:80 belongs to source \"file\"`,
	} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %s:\n%s", want, log)
		}
	}
	for _, s := range b.status().Services {
		if s.Name == "meets" {
			t.Errorf("a service that meets one of the file is in force: %+v", s)
		}
	}
}
