package net

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/kube/source"
)

// fleetVariable is the number of Services of TestFleet, and of endpoints of each, "SERVICESxENDPOINTS"; 10000x100 is
// for measuring.
const fleetVariable = "SHUNT_NET_FLEET"

// fleetChanges is the number of changes that are measured together.
const fleetChanges = 100

// fleetTable is the services' table size. With the default for 100 backends, 10,000 services would need more slots than
// limits.slots allows.
const fleetTable = 1021

// fleetNetwork is the network of the endpoints. Many share an address, and none has a port there that another one has.
var fleetNetwork = netip.MustParsePrefix("10.99.0.0/16")

const fleetAddresses = 1000

// carriedOut is the agent's message after each change.
const carriedOut = "fleet: carried out"

// runFleet is `shunt-kube run` as far as a change goes, but with smaller tables.
func runFleet() int {
	options := node.Options{Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	flags := flag.NewFlagSet("fleet", flag.ExitOnError)
	flags.StringVar(&options.ConfigPath, "config", "", "")
	flags.StringVar(&options.Instance, "instance", "", "")
	flags.StringVar(&options.Socket, "socket", "", "")
	kubeconfig := flags.String("kubeconfig", "", "")
	_ = flags.Parse(os.Args[1:]) // exits
	err := func() error {
		settings, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
		if err != nil {
			return err
		}
		source.Configure(settings, options.Log)
		client, err := kubernetes.NewForConfig(settings)
		if err != nil {
			return err
		}
		s, err := source.New(source.Options{Client: client, Node: "n1", Log: options.Log})
		if err != nil {
			return err
		}
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
		defer stop()
		if err := s.Open(ctx); err != nil {
			return err
		}
		options.Products = []node.Product{daemon.Product(daemon.Options{Sources: []daemon.Source{{Name: source.Name,
			First: func() []model.Service { return withTables(s.First()) },
			Run: func(ctx context.Context, declare func(daemon.Change) error) {
				s.Follow(ctx, func(c daemon.Change) error {
					c.Declare = withTables(c.Declare)
					err := declare(c)
					if err == nil && !c.Whole {
						fmt.Fprintln(os.Stderr, carriedOut)
					}
					return err
				})
			}}}})}
		return node.Run(ctx, options)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func withTables(services []model.Service) []model.Service {
	for i := range services {
		services[i].TableSize = fleetTable
	}
	return services
}

// TestFleet: an endpoint of one of many Services is replaced by another one, again and again, and the maps follow. It
// prints the agent's cost of a change, from the apiserver's message to the kernel's maps.
func TestFleet(t *testing.T) {
	t.Parallel()
	fleet := os.Getenv(fleetVariable)
	patience, limits := patience, ""
	if fleet == "" {
		fleet = "20x10"
	} else {
		patience, limits = 10*time.Minute, "limits: {flows: 10000, services: 10100, backends: 1048575, slots: 12000000}\n"
	}
	var services, endpoints int
	if n, err := fmt.Sscanf(fleet, "%dx%d", &services, &endpoints); n != 2 || err != nil || services < 1 || endpoints < 1 || endpoints > fleetAddresses/2 {
		t.Fatalf("%s=%s is not SERVICESxENDPOINTS", fleetVariable, fleet)
	}
	b := newBed(t)
	b.must(b.Balancer.AddRoute(lab.Route{To: fleetNetwork, Via: b.Backends[0].Addr4()}))
	front := b.Balancer.Interfaces()[0]
	b.node("n1", front.IPv4.Addr())
	begin := time.Now()
	f := &fleetOf{bed: b, endpoints: endpoints}
	f.make(services)
	t.Logf("%s: made after %s", fleet, time.Since(begin).Round(time.Millisecond))

	file := filepath.Join(b.folder, "shunt.yaml")
	b.must(os.WriteFile(file, fmt.Appendf(nil, "%sinterfaces: [{name: eth0, attach: native}, {name: eth1, attach: native}]\nservices: []\n", limits), 0o644))
	begin = time.Now()
	agent, err := b.child("fleet", "--config", file, "--instance", b.instance, "--socket", b.socket(), "--kubeconfig", b.kubeconfig()).Spawn()
	b.must(err)
	b.agent = agent
	b.until(patience, "in step with the cluster", 1)
	cpu, err := agent.CPUTime()
	b.must(err)
	t.Logf("%s: in step after %s, and %s of CPU", fleet, time.Since(begin).Round(time.Millisecond), cpu)
	for _, x := range []struct {
		what   string
		change func(version int)
	}{
		{"endpoint is another one", func(version int) { f.point(services/2, version, true) }},
		{"endpoint is ready or not", func(version int) { f.point(services/2, 0, version%2 == 0) }},
	} {
		x.change(1) // does not count, and the first that does is another one
		before, err := agent.CPUTime()
		b.must(err)
		begin := time.Now()
		for version := range fleetChanges {
			x.change(version)
		}
		after, err := agent.CPUTime()
		b.must(err)
		t.Logf("%s: one change after which one %s: %.2f ms of CPU, %.2f ms until it is in force", fleet, x.what,
			float64((after-before).Microseconds())/1000/fleetChanges, float64(time.Since(begin).Microseconds())/1000/fleetChanges)
	}
}

// fleetOf are many Services of a bed.
type fleetOf struct {
	*bed
	endpoints int
	services  []*corev1.Service
	changes   int
}

// make makes all, several at a time.
func (f *fleetOf) make(services int) {
	f.services = make([]*corev1.Service, services)
	numbers := make(chan int)
	var all sync.WaitGroup
	failures := make(chan error, 8)
	for range cap(failures) {
		all.Go(func() {
			for i := range numbers {
				err := f.one(i)
				if err != nil {
					select {
					case failures <- err:
					default:
					}
				}
			}
		})
	}
	for i := range services {
		numbers <- i
	}
	close(numbers)
	all.Wait()
	select {
	case err := <-failures:
		f.t.Fatal(err)
	default:
	}
}

func (f *fleetOf) one(i int) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("fleet-%05d", i)},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	var err error
	if f.services[i], err = f.client.CoreV1().Services("default").Create(ctx, service, metav1.CreateOptions{}); err != nil {
		return err
	}
	_, err = f.client.DiscoveryV1().EndpointSlices("default").Create(ctx, f.slice(i, 0, true), metav1.CreateOptions{})
	return err
}

// slice is the EndpointSlice of one of them. Its last endpoint's address depends on the version.
func (f *fleetOf) slice(service, version int, ready bool) *discoveryv1.EndpointSlice {
	port, name, protocol, yes := int32(1+service), "", corev1.ProtocolTCP, true
	slice := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("fleet-%05d", service), Labels: map[string]string{discoveryv1.LabelServiceName: fmt.Sprintf("fleet-%05d", service)}}}
	for i := range f.endpoints {
		number, is := (service*f.endpoints+i)%fleetAddresses, &yes
		if i == f.endpoints-1 {
			number, is = fleetAddresses+version%4, &ready // no other endpoint's address, as that of a new pod
		}
		address := netip.AddrFrom4([4]byte{10, 99, byte(number / 200), byte(1 + number%200)})
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{address.String()}, Conditions: discoveryv1.EndpointConditions{Ready: is}})
	}
	return slice
}

// point makes a change, and waits until the agent has carried it out.
func (f *fleetOf) point(service, version int, ready bool) {
	f.t.Helper()
	f.changes++
	_, err := f.client.DiscoveryV1().EndpointSlices("default").Update(within(f.t), f.slice(service, version, ready), metav1.UpdateOptions{})
	f.must(err)
	f.until(patience, carriedOut, f.changes)
}

// until waits until the agent has printed a text as often as that.
func (b *bed) until(patience time.Duration, text string, times int) {
	b.t.Helper()
	end := time.Now().Add(patience)
	for strings.Count(b.agent.Log(), text) < times {
		select {
		case <-b.agent.Ended:
			b.t.Fatalf("%s ended: %v\n%s", b.agent.Path, b.agent.Err(), b.agent.Log())
		case <-time.After(time.Millisecond):
		}
		if time.Now().After(end) {
			b.t.Fatalf("not within %s: %q\n%s", patience, text, b.agent.Log())
		}
	}
}
