package daemon_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	lb "github.com/shunt-lb/shunt/internal/lb/command"
	balancer "github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/pod/command"
	"github.com/shunt-lb/shunt/internal/pod/daemon"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	udp "github.com/shunt-lb/shunt/internal/udp/daemon"
	"github.com/vishvananda/netlink"
)

// runVariable makes this binary `shunt run` with the file at the path.
const runVariable = "SHUNT_TEST_POD_RUN"

// line is shunt with the balancer, the UDP path and the pod shortcut, which run beside each other.
var line = lb.Line(func() []node.Product {
	return []node.Product{balancer.Product(balancer.Options{}), udp.Product(), daemon.Product()}
}, command.Product)

func TestMain(m *testing.M) {
	if path := os.Getenv(runVariable); path != "" {
		os.Exit(cli.Main(line, []string{"run", "--config", path, "--instance", filepath.Base(filepath.Dir(path))}, os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(nodetest.Main(m))
}

// world is a host with pods and rules that drop packets that conntrack finds invalid, on which `shunt run` runs.
type world struct {
	*nodetest.Daemon
	*bed.Bed
	rules *plain.Rules
}

func newWorld(t *testing.T, pods int, text string) *world {
	t.Helper()
	b, rules := bedtest.New(t, pods)
	w := &world{Daemon: nodetest.New(t, b.Node), Bed: b, rules: rules}
	w.Write(text)
	return w
}

// run starts the daemon, and returns when it answers.
func (w *world) run() {
	w.Helper()
	w.Daemon.Run(runVariable + "=" + w.Config())
}

// are waits until the pods' addresses, in the order of pods, have these states.
func (w *world) are(states ...string) {
	w.Helper()
	w.Is(fmt.Sprintf("the pods are %v", states), func(st *shuntv1.GetStatusResponse) bool {
		var have []string
		for i := range states {
			have = append(have, state(st, w.Interface(i)))
		}
		return slices.Equal(have, states)
	})
}

func find(st *shuntv1.GetStatusResponse, iface string) *shuntv1.AcceleratedPod {
	i := slices.IndexFunc(st.Acceleration.GetPods(), func(p *shuntv1.AcceleratedPod) bool { return p.Interface == iface })
	if i < 0 {
		return nil
	}
	return st.Acceleration.Pods[i]
}

// state returns the state of a pod whose addresses all have the same; "" if there is none.
func state(st *shuntv1.GetStatusResponse, iface string) string {
	p := find(st, iface)
	if p == nil || slices.ContainsFunc(p.Addresses, func(a *shuntv1.AcceleratedAddress) bool { return a.State != p.Addresses[0].State }) {
		return ""
	}
	return p.Addresses[0].State
}

func count(st *shuntv1.GetStatusResponse, reason string) uint64 {
	return st.Acceleration.GetCounts()[reason].GetPackets()
}

// forwarded is the number of packets that the rules have seen, without packets that came while nobody had judged for a
// second: an emulated machine is that slow.
func (w *world) forwarded() int64 {
	w.Helper()
	st, err := w.Ask()
	w.Must(err)
	return int64(w.seen() - count(st, "unwatched"))
}

// stream is the number of octets that take so long that a daemon ends meanwhile; -short is for machines that are
// emulated, and slow.
func stream() int {
	if testing.Short() {
		return 3_000_000
	}
	return 30_000_000
}

// connect is a TCP connection between the first two pods.
func (w *world) connect(is6 bool) (client, server net.Conn) {
	w.Helper()
	return bedtest.Connect(w.T, w.Bed, is6)
}

// settle exchanges octets until they take the shortcut.
func (w *world) settle(c, s net.Conn) {
	w.Helper()
	first, err := w.Ask()
	w.Must(err)
	w.Is("the connection takes the shortcut", func(st *shuntv1.GetStatusResponse) bool {
		w.Must(bedtest.Exchange(c, s, 10))
		return count(st, "taken") > count(first, "taken")+10
	})
}

// onNode changes interfaces of the host.
func (w *world) onNode(do func() error) {
	w.Helper()
	w.Must(w.Node.Run(do))
}

func (w *world) link(name string) netlink.Link {
	w.Helper()
	l, err := netlink.LinkByName(name)
	w.Must(err)
	return l
}

// command runs a command that asks the daemon, and returns its output.
func (w *world) command(words string) string {
	w.Helper()
	var out strings.Builder
	if code := cli.Main(line, append(strings.Fields(words), "--socket", w.Socket()), nil, &out, &out); code != 0 {
		w.Errorf("shunt %s ends with %d: %s", words, code, out.String())
	}
	return out.String()
}
