package command

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/start"
	"github.com/shunt-lb/shunt/kube/source"
)

// nodeVariable makes this binary an agent's node with the file at the path, in a cluster of one Service.
const nodeVariable = "SHUNT_TEST_KUBE_NODE"

// takenVariable is the number of source ports that the node finds taken.
const takenVariable = "SHUNT_TEST_KUBE_TAKEN"

func TestMain(m *testing.M) {
	if path := os.Getenv(nodeVariable); path != "" {
		if err := runNode(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(nodetest.Main(m))
}

// runNode does as run does, without an apiserver.
func runNode(path string) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	client := fake.NewClientset(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}}}})
	s, err := source.New(source.Options{Client: client, Node: "n1", Log: log})
	if err != nil {
		return err
	}
	flags := start.Flags{Options: node.Options{ConfigPath: path, Instance: filepath.Base(filepath.Dir(path)), OnExit: node.ExitKeep, Log: log}}
	ctx := flags.Obey(context.Background(), func() { os.Exit(exitInterrupted) })
	if err := s.Open(ctx); err != nil {
		return err
	}
	options := daemon.Options{Sources: []daemon.Source{{Name: source.Name, First: s.First, Run: s.Follow}}}
	if text := os.Getenv(takenVariable); text != "" {
		count, err := strconv.Atoi(text)
		if err != nil {
			return err
		}
		options.Taken = func() ([]store.SourcePort, error) { return taken(count), nil }
	}
	flags.Products = products(options)
	flags.Status = func(st *shuntv1.GetStatusResponse) { st.Cluster = s.Status() }
	return flags.Run(ctx, os.Stderr)
}

// TestPodsOfANode: with accelerate in its file, the agent has routed pods take the shortcut beside the Services that it balances. Connections
// go on without it, and with the next one.
func TestPodsOfANode(t *testing.T) {
	b, _ := bedtest.New(t, 2)
	d := nodetest.New(t, b.Node)
	outside, err := b.Lab.AddHost("outside")
	d.Must(err)
	d.Must(b.Lab.Connect(lab.End{Host: b.Node, Interface: "up0"}, lab.End{Host: outside, Interface: "eth0"}, lab.Cable{}))
	d.Write("interfaces: [{name: up0, attach: generic}]\naccelerate: {interfaces: \"veth*\"}")
	run := func() {
		t.Helper()
		d.Run(nodeVariable + "=" + d.Config())
		d.Is("the Service is served, and both pods may take the shortcut", func(st *shuntv1.GetStatusResponse) bool {
			pods := st.Acceleration.GetPods()
			return len(st.Services) == 1 && st.Services[0].Name == "default/web:http" && len(pods) == 2 && !slices.ContainsFunc(pods, func(p *shuntv1.AcceleratedPod) bool {
				return len(p.Addresses) != 2 || p.Addresses[0].State != "taken" || p.Addresses[1].State != "taken"
			})
		})
	}
	run()
	showsStatus(d)
	client, server := bedtest.Connect(t, b, false)
	d.Is("a connection takes the shortcut", func(st *shuntv1.GetStatusResponse) bool {
		d.Must(bedtest.Exchange(client, server, 1000))
		return st.Acceleration.Counts["taken"].GetPackets() > 10
	})
	d.Must(d.Process.End(syscall.SIGTERM, nodetest.Patience))
	d.Must(bedtest.Exchange(client, server, 100_000))
	run()
	refusesReload(d)
	d.Must(bedtest.Exchange(client, server, 100_000))
	d.Must(d.Process.End(syscall.SIGINT, nodetest.Patience)) // which detaches
	d.Must(bedtest.Exchange(client, server, 100_000))
}

// refusesReload: a file that has lost the balancer's keys is refused by name, and the Service stays served.
func refusesReload(d *nodetest.Daemon) {
	d.Helper()
	d.Write("accelerate: {interfaces: \"veth*\"}")
	ctx, cancel := context.WithTimeout(d.Context(), nodetest.Patience)
	defer cancel()
	r, err := d.API.Reload(ctx)
	d.Must(err)
	if r.Applied || len(r.Faults) != 1 || r.Faults[0].Message != `there is no key "interfaces"` {
		d.Errorf("a reload without interfaces: applied: %t, faults %v", r.Applied, r.Faults)
	}
	d.Is("the Service is served as before", func(st *shuntv1.GetStatusResponse) bool {
		return len(st.Services) == 1 && st.Services[0].Name == "default/web:http" && len(st.Attached) == 1
	})
}

// taken are different source ports.
func taken(count int) (ports []store.SourcePort) {
	for i := range count {
		ports = append(ports, store.SourcePort{Protocol: model.TCP, Source: netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(1024+i)), Backend: netip.MustParseAddrPort("10.0.0.1:80")})
	}
	return ports
}

// TestStartsWithAFullTable: more ports are taken than the table of flows has room for, which is a warning, and the Services are served.
func TestStartsWithAFullTable(t *testing.T) {
	b, _ := bedtest.New(t, 1)
	d := nodetest.New(t, b.Node)
	outside, err := b.Lab.AddHost("outside")
	d.Must(err)
	d.Must(b.Lab.Connect(lab.End{Host: b.Node, Interface: "up0"}, lab.End{Host: outside, Interface: "eth0"}, lab.Cable{}))
	const flows, ports = 1000, 30_000
	d.Write(fmt.Sprintf("interfaces: [{name: up0, attach: generic}]\nlimits: {flows: %d}", flows))
	d.Run(nodeVariable+"="+d.Config(), fmt.Sprintf("%s=%d", takenVariable, ports))
	d.Is("the Service is served", func(st *shuntv1.GetStatusResponse) bool { return len(st.Services) == 1 })
	if log := d.Process.Log(); strings.Count(log, "cannot reserve all source ports") != 1 || !strings.Contains(log, "limits.flows") {
		t.Errorf("it does not say once that the table is full:\n%s", log)
	}
}
