package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/bed"
	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/vishvananda/netlink"
)

// runVariable makes this binary `shunt run` with the file at the path.
const runVariable = "SHUNT_TEST_POD_RUN"

const patience = 20 * time.Second

func TestMain(m *testing.M) {
	if path := os.Getenv(runVariable); path != "" {
		os.Exit(cli.Main([]string{"run", "--config", path, "--instance", filepath.Base(filepath.Dir(path))}, os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// world is a host with pods and rules that drop what conntrack finds invalid, on which `shunt run` runs.
type world struct {
	*testing.T
	*bed.Bed
	rules  *plain.Rules
	config string
	api    *control.Client
	node   *lab.Process
}

func newWorld(t *testing.T, pods int, text string) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces and loads programs")
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	b, err := bed.New(ctx, pods)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{T: t, Bed: b}
	t.Cleanup(func() { w.must(b.Close()) })
	w.rules, err = b.Install()
	w.must(err)
	folder, err := os.MkdirTemp("", "shunt-pod-")
	w.must(err)
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	w.config, w.api = filepath.Join(folder, "shunt.yaml"), control.NewClient(filepath.Join(folder, "api.sock"))
	w.write(text)
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) socket() string { return filepath.Join(filepath.Dir(w.config), "api.sock") }

func (w *world) write(text string) {
	w.Helper()
	w.must(os.WriteFile(w.config, []byte(fmt.Sprintf("api: {socket: %s}\nmetrics: {listen: \"127.0.0.1:9470\"}\n%s\n", w.socket(), text)), 0o600))
}

// run starts the daemon, and returns when it answers.
func (w *world) run() {
	w.Helper()
	cmd := w.Node.Command(context.Background(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), runVariable+"="+w.config)
	p, err := cmd.Spawn()
	w.must(err)
	w.node = p
	w.Cleanup(func() { _ = p.Process.Kill(); <-p.Ended })
	w.Cleanup(func() { _ = p.End(syscall.SIGINT, patience) }) // first, so that it leaves nothing
	w.is("the daemon runs", func(*shuntv1.GetStatusResponse) bool { return true })
}

func (w *world) reload() string {
	w.Helper()
	r, err := w.api.Reload(w.Context())
	w.must(err)
	if !r.Applied {
		w.Fatalf("the reload was refused: %s, %v", r.Refused, r.Faults)
	}
	return r.Text
}

func (w *world) ask() (*shuntv1.GetStatusResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return w.api.Status(ctx)
}

// is waits until a condition on the status holds.
func (w *world) is(what string, holds func(*shuntv1.GetStatusResponse) bool) *shuntv1.GetStatusResponse {
	w.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		st, err := w.ask()
		if err == nil && holds(st) {
			return st
		}
		if time.Now().After(deadline) {
			w.Fatalf("%s: not within %s: %v, %v\n%s", what, patience, err, st, w.node.Log())
		}
	}
}

// are waits until the pods' addresses, in the order of pods, have these states.
func (w *world) are(states ...string) {
	w.Helper()
	w.is(fmt.Sprintf("the pods are %v", states), func(st *shuntv1.GetStatusResponse) bool {
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

// state is that of a pod whose addresses all have the same; "" if there is none.
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

func condition(st *shuntv1.GetStatusResponse, code, subject string) string {
	for _, c := range st.GetDaemon().GetConditions() {
		if c.Code == code && c.Subject == subject {
			return c.Text
		}
	}
	return ""
}

// connect is a TCP connection between the first two pods.
func (w *world) connect(is6 bool) (client, server net.Conn) {
	w.Helper()
	l, err := w.Pods[1].Listen("tcp", netip.AddrPortFrom(w.Address(1, is6), 0).String())
	w.must(err)
	defer l.Close() //nolint:errcheck // nothing is lost
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := w.Pods[0].Dial(ctx, "tcp", l.Addr().String())
	w.must(err)
	s, err := l.Accept()
	w.must(err)
	w.Cleanup(func() { _, _ = c.Close(), s.Close() })
	return c, s
}

// exchange sends so many octets there, and back.
func exchange(a, b net.Conn, octets int) error {
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		end := time.Now().Add(patience)
		_, _ = way[0].SetDeadline(end), way[1].SetDeadline(end)
		sent := make(chan error, 1)
		go func() {
			_, err := way[0].Write(make([]byte, octets))
			sent <- err
		}()
		_, err := io.ReadFull(way[1], make([]byte, octets))
		if err = errors.Join(err, <-sent); err != nil {
			return fmt.Errorf("exchange %d octets: %w", octets, err)
		}
	}
	return nil
}

// settle exchanges octets until they take the shortcut.
func (w *world) settle(c, s net.Conn) {
	w.Helper()
	first, err := w.ask()
	w.must(err)
	w.is("the connection takes the shortcut", func(st *shuntv1.GetStatusResponse) bool {
		w.must(exchange(c, s, 10))
		return count(st, "taken") > count(first, "taken")+10
	})
}

// scrape is what Prometheus would get.
func (w *world) scrape() string {
	w.Helper()
	conn, err := w.Node.Dial(w.Context(), "tcp", "127.0.0.1:9470")
	w.must(err)
	defer conn.Close() //nolint:errcheck // nothing is lost
	_, err = io.WriteString(conn, "GET /metrics HTTP/1.0\r\n\r\n")
	w.must(err)
	text, err := io.ReadAll(conn)
	w.must(err)
	return string(text)
}

// onNode changes interfaces of the host.
func (w *world) onNode(do func() error) {
	w.Helper()
	w.must(w.Node.Run(do))
}

func (w *world) link(name string) netlink.Link {
	w.Helper()
	l, err := netlink.LinkByName(name)
	w.must(err)
	return l
}

// command is what a command prints that asks the daemon.
func (w *world) command(words string) string {
	w.Helper()
	var out strings.Builder
	if code := cli.Main(append(strings.Fields(words), "--socket", w.socket()), nil, &out, &out); code != 0 {
		w.Errorf("shunt %s ends with %d: %s", words, code, out.String())
	}
	return out.String()
}
