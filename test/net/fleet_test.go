package net

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// A shunt process with fleetVariable, "SERVICESxBACKENDS", has a source with that many services of that many backends
// each, which changes one of them again and again, and prints the cost of a change for the process.
const fleetVariable = "SHUNT_NET_FLEET"

// fleetChanges is the number of changes that are measured together.
const fleetChanges = 40

// fleetNetwork has the backends' addresses. Many share an address, as the containers of a pod do, but no port.
var fleetNetwork = netip.MustParsePrefix("10.99.0.0/16")

const fleetAddresses = 1000

// fleetOf is one of the services of a fleet. version is the number of replacements of its last backend.
func fleetOf(service, backends, version int) model.Service {
	s := model.Service{
		Name: fmt.Sprintf("fleet-%05d", service), Forwarding: model.ForwardingNAT, Announce: model.AnnounceNone, TableSize: 1021,
		Frontends: []model.Frontend{{Address: netip.AddrFrom4([4]byte{10, 96, byte(service >> 8), byte(service)}), Protocol: model.TCP, Ports: value.PortRange{First: 80, Last: 80}}},
	}
	for i := range backends {
		n := service*backends + i
		port := 1 + n/fleetAddresses*4
		if i == backends-1 {
			port += version % 4
		}
		b := model.Backend{Weight: 1, BackendAddress: model.BackendAddress{Port: uint16(port),
			Address: netip.AddrFrom4([4]byte{10, 99, byte(n % fleetAddresses >> 8), byte(n % fleetAddresses)})}}
		b.Name = b.BackendAddress.String()
		s.Backends = append(s.Backends, b)
	}
	return s
}

// fleetSource is the source of a fleet.
func fleetSource(size string, log *slog.Logger) daemon.Source {
	var services, backends int
	if _, err := fmt.Sscanf(size, "%dx%d", &services, &backends); err != nil {
		panic(fmt.Sprintf("%s=%s: %v", fleetVariable, size, err))
	}
	return daemon.Source{Name: "fleet",
		First: func() (all []model.Service) {
			for i := range services {
				all = append(all, fleetOf(i, backends, 0))
			}
			return all
		},
		Run: func(ctx context.Context, declare func(daemon.Change) error) {
			measured := func(what string, change func(i int) daemon.Change) {
				before, began := cpuUsed(), time.Now()
				for i := range fleetChanges {
					if err := declare(change(i)); err != nil {
						log.Error("refused", "error", err)
						return
					}
				}
				log.Info("fleet: "+what, "cpu_ms", fmt.Sprintf("%.2f", (cpuUsed()-before).Seconds()*1000/fleetChanges),
					"wall_ms", fmt.Sprintf("%.2f", time.Since(began).Seconds()*1000/fleetChanges))
			}
			measured("weight", func(i int) daemon.Change {
				s := fleetOf(services/2, backends, 0)
				s.Backends[0].Weight = uint16(2 + i%2)
				return daemon.Change{Declare: []model.Service{s}}
			})
			measured("backend", func(i int) daemon.Change {
				return daemon.Change{Declare: []model.Service{fleetOf(services/2, backends, 1+i)}}
			})
			measured("service", func(i int) daemon.Change {
				if i%2 == 0 {
					return daemon.Change{Withdraw: []string{fleetOf(services/2, backends, 0).Name}}
				}
				return daemon.Change{Declare: []model.Service{fleetOf(services/2, backends, 1)}}
			})
			log.Info("fleet: done")
		},
	}
}

// cpuUsed is the CPU time of this process so far.
func cpuUsed() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// TestFleet: a source changes one of many services, its weights, its backends and the service itself, and the maps
// follow. It prints the cost of a change for the daemon, from the source to the kernel's maps;
// SHUNT_NET_FLEET=10000x100 is for measuring.
func TestFleet(t *testing.T) {
	fleet := os.Getenv(fleetVariable)
	patience, limits := 30*time.Second, "flows: 10000"
	if fleet == "" {
		fleet = "50x10"
	} else {
		patience, limits = 10*time.Minute, "flows: 10000, services: 10100, backends: 1048575, slots: 12000000"
	}
	b := newBed(t, lab.Options{Layout: lab.OneArm, VIPOnLink: true, Backends: 1})
	if err := b.Balancer.AddRoute(lab.Route{To: fleetNetwork, Via: b.Backends[0].Addr4()}); err != nil {
		t.Fatal(err)
	}
	b.env = []string{fleetVariable + "=" + fleet}
	b.write(b.file(settings{attach: "generic", limits: limits}))
	b.daemon = b.launch()
	eventually(t, patience, "the fleet's changes", func() error {
		if log := b.daemon.log(); !regexp.MustCompile(`msg="fleet: done"`).MatchString(log) {
			return fmt.Errorf("the log of shunt:\n%s", log)
		}
		return nil
	})
	for _, line := range regexp.MustCompile(`msg="fleet: (\w+)" cpu_ms=(\S+) wall_ms=(\S+)`).FindAllStringSubmatch(b.daemon.log(), -1) {
		t.Logf("%s: one %s costs %s ms of CPU, and takes %s ms", fleet, line[1], line[2], line[3])
	}
	var services, backends int
	_, _ = fmt.Sscanf(fleet, "%dx%d", &services, &backends)
	name, want := fleetOf(services/2, backends, 1).Name, fleetOf(services/2, backends, 1).Backends[backends-1].Name
	for _, s := range b.status().Services {
		if s.Name != name {
			continue
		}
		for _, x := range s.Backends {
			if x.Address == want && x.Slots > 0 {
				return
			}
		}
		t.Fatalf("service %s has no slot for %s, which came last, in %d backends", name, want, len(s.Backends))
	}
	t.Fatalf("service %s is not there, of %s", name, strconv.Itoa(services))
}
