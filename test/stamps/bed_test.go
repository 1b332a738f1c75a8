// Package stamps sends probes of `shunt diag ping` through a balancer that stamps them: two products together, as their
// users run them. test/net has the balancer alone.
//
// shunt is this test binary again, as in test/net.
package stamps

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	diag "github.com/shunt-lb/shunt/internal/diag/command"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/shunt-lb/shunt/test/next"
)

const (
	// childVariable makes this binary the command line of shunt, and runVariable `shunt run` with the file at the path.
	childVariable, runVariable = "SHUNT_STAMPS_CHILD", "SHUNT_STAMPS_RUN"
	// nextVariable makes this binary the next version, with another ABI.
	nextVariable = "SHUNT_STAMPS_NEXT"
)

func TestMain(m *testing.M) {
	if os.Getenv(nextVariable) != "" {
		abi.Become(next.Version())
	}
	args := os.Args[1:]
	path := os.Getenv(runVariable)
	if path != "" {
		args = []string{"run", "--config", path, "--instance", instanceOf(path)}
	}
	if path != "" || os.Getenv(childVariable) != "" {
		os.Exit(cli.Main(line, args, os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(nodetest.Main(m))
}

// line is a command line with `shunt run` for the balancer, and diagnosis.
func line(s cli.Streams) *cobra.Command {
	return cli.Root(s, func() []node.Product { return []node.Product{daemon.Product(daemon.Options{})} }, diag.Product(s))
}

func instanceOf(config string) string { return filepath.Base(filepath.Dir(config)) }

// vips are the addresses of the services, one of each family.
var vips = []netip.Addr{lab.VIP4, lab.VIP6}

// bed is a client, a balancer on which `shunt run` runs, and a server.
type bed struct {
	*nodetest.Daemon
	*lab.Topology
}

var beds atomic.Int64

// newBed builds the network. Nothing runs yet.
func newBed(t *testing.T) *bed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces and BPF need root: run the tests with sudo")
	}
	t.Parallel() // beds share nothing but the machine, and mostly wait
	ctx, cancel := context.WithTimeout(context.Background(), nodetest.Patience)
	defer cancel()
	topology, err := lab.Build(ctx, lab.Options{ID: fmt.Sprintf("s%dx%d", os.Getpid(), beds.Add(1)), Layout: lab.OneArm, Backends: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := topology.Close(); err != nil {
			t.Error(err)
		}
	})
	return &bed{nodetest.New(t, topology.Balancer), topology}
}

// forward starts `shunt run` and waits until it forwards.
func (b *bed) forward(variables ...string) {
	b.Helper()
	b.Daemon.Run(append(variables, runVariable+"="+b.Config())...)
	b.Is("the balancer forwards", func(st *shuntv1.GetStatusResponse) bool { return st.Forwarding })
}

// command is shunt with arguments on a host.
func command(h *lab.Host, args ...string) *lab.Command {
	c := h.Command(context.Background(), "/proc/self/exe", args...)
	c.Env = append(os.Environ(), childVariable+"=1")
	return c
}

// serve starts a command on a host, which runs until the test ends, and waits until it has printed a text.
func (b *bed) serve(h *lab.Host, text string, args ...string) {
	b.Helper()
	p := b.Spawn(command(h, args...), childVariable+"=1")
	b.Cleanup(func() { b.Must(p.End(syscall.SIGTERM, nodetest.Patience)) })
	eventually(b.T, fmt.Sprintf("%q from shunt %s", text, strings.Join(args, " ")), func() error {
		if !strings.Contains(p.Log(), text) {
			return errors.New(p.Log())
		}
		return nil
	})
}

// eventually waits for a condition that another process brings about. It pauses as long as the last check took, within
// limits: a check that starts a process takes CPU time from the awaited process.
func eventually(t *testing.T, what string, ready func() error) {
	t.Helper()
	for end := time.Now().Add(nodetest.Patience); ; {
		began := time.Now()
		err := ready()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %s: %v", what, nodetest.Patience, err)
		}
		<-time.After(min(max(time.Since(began), 20*time.Millisecond), 200*time.Millisecond))
	}
}
