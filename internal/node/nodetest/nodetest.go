// Package nodetest runs `shunt run` on a lab's host for the tests of a product. Only tests import it.
package nodetest

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/node"
)

// Patience is the time to wait for something that takes milliseconds. An emulated machine that does other things beside takes more than a minute, because it verifies
// each program that the daemon loads.
const Patience = 5 * time.Minute

// metricsAddress is the address of the daemon's metrics, in its own network namespace.
const metricsAddress = "127.0.0.1:9470"

// Daemon is `shunt run` with a file of its own.
type Daemon struct {
	*testing.T
	Host    *lab.Host
	Folder  string // folder of the file and the socket; other users cannot reach it
	API     *control.Client
	Process *lab.Process                     // the process that was started last
	Look    func(*shuntv1.GetStatusResponse) // Is calls it with each answer; may be nil
}

// instances are the names of all daemons of this process. A test's `shunt run` has the name of its folder.
var instances struct {
	sync.Mutex
	names []string
}

// Main runs the tests for TestMain, and returns the exit code. Tests that leave files in shunt's run directory fail.
func Main(m *testing.M) int {
	code := m.Run()
	for _, name := range instances.names {
		for _, path := range files(name) {
			fmt.Fprintf(os.Stderr, "the tests have left %s\n", path)
			code = max(code, 1)
		}
	}
	return code
}

// files are the files of an instance in shunt's run directory.
func files(instance string) []string {
	paths, _ := filepath.Glob(filepath.Join(node.RunDirectory, instance+".*")) // the only error is of the pattern
	return paths
}

// New returns a daemon that does not run yet.
func New(t *testing.T, host *lab.Host) *Daemon {
	t.Helper()
	folder, err := os.MkdirTemp("", "shunt-node-")
	if err != nil {
		t.Fatal(err)
	}
	instance := filepath.Base(folder)
	instances.Lock()
	instances.names = append(instances.names, instance)
	instances.Unlock()
	t.Cleanup(func() {
		for _, path := range files(instance) {
			// A daemon that was killed leaves its lock, and a record that it was writing.
			if strings.HasSuffix(path, ".lock") || strings.HasSuffix(path, ".new") {
				_ = os.Remove(path)
			}
		}
		_ = os.RemoveAll(folder)
	})
	d := &Daemon{T: t, Host: host, Folder: folder}
	d.API = control.NewClient(d.Socket())
	return d
}

// Must ends the test if there is an error.
func (d *Daemon) Must(err error) {
	d.Helper()
	if err != nil {
		d.Fatal(err)
	}
}

// Socket returns the path of the API's socket.
func (d *Daemon) Socket() string { return filepath.Join(d.Folder, "api.sock") }

// Config returns the path of the file.
func (d *Daemon) Config() string { return filepath.Join(d.Folder, "shunt.yaml") }

// Write writes the file, with a product's keys and the keys of the API and the metrics.
func (d *Daemon) Write(keys string) {
	d.Helper()
	d.Must(os.WriteFile(d.Config(), []byte(fmt.Sprintf("api: {socket: %s}\nmetrics: {listen: %q}\n%s\n", d.Socket(), metricsAddress, keys)), 0o600))
}

// Spawn starts a command, which is killed at the end of the test.
func (d *Daemon) Spawn(cmd *lab.Command, variables ...string) *lab.Process {
	d.Helper()
	cmd.Env = append(os.Environ(), variables...)
	p, err := cmd.Spawn()
	d.Must(err)
	d.Cleanup(func() { Kill(p) })
	return p
}

// Kill does the same as kill -9.
func Kill(p *lab.Process) {
	_ = p.Process.Kill()
	<-p.Ended
}

// Self returns a command that runs this binary on the host. Its path also works if the binary's folder is closed.
func (d *Daemon) Self() *lab.Command { return d.Host.Command(context.Background(), "/proc/self/exe") }

// Run starts this binary, which the variables make `shunt run` with the file, and returns when the daemon answers.
func (d *Daemon) Run(variables ...string) {
	d.Helper()
	p := d.Spawn(d.Self(), variables...)
	d.Process = p
	d.Cleanup(func() { d.Must(p.End(syscall.SIGINT, Patience)) }) // before it is killed, so that it leaves nothing
	d.Is("the daemon runs", func(*shuntv1.GetStatusResponse) bool { return true })
}

// Ask returns the status.
func (d *Daemon) Ask() (*shuntv1.GetStatusResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	return d.API.Status(ctx)
}

// Is waits until a condition on the status holds.
func (d *Daemon) Is(what string, holds func(*shuntv1.GetStatusResponse) bool) *shuntv1.GetStatusResponse {
	d.Helper()
	for deadline := time.Now().Add(Patience); ; {
		begin := time.Now()
		st, err := d.Ask()
		took := time.Since(begin)
		if err == nil && d.Look != nil {
			d.Look(st)
		}
		if err == nil && holds(st) {
			return st
		}
		if time.Now().After(deadline) {
			d.Fatalf("%s: not within %s: %v, %v\n%s", what, Patience, err, st, d.Process.Log())
		}
		time.Sleep(max(5*time.Millisecond, took)) // where asking takes long, the daemon has half of the time for other things
	}
}

// Reload makes the daemon read its file again, and returns the reported changes.
func (d *Daemon) Reload() string {
	d.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	r, err := d.API.Reload(ctx)
	d.Must(err)
	if !r.Applied {
		d.Fatalf("the reload was refused: %s, %v", r.Refused, r.Faults)
	}
	return r.Text
}

// Scrape returns the answer that Prometheus would get.
func (d *Daemon) Scrape() string {
	d.Helper()
	conn, err := d.Host.Dial(d.Context(), "tcp", metricsAddress)
	d.Must(err)
	defer conn.Close() //nolint:errcheck // nothing is lost
	_, err = io.WriteString(conn, "GET /metrics HTTP/1.0\r\n\r\n")
	d.Must(err)
	text, err := io.ReadAll(conn)
	d.Must(err)
	return string(text)
}

// Condition returns the text of a condition, "" if there is none.
func Condition(st *shuntv1.GetStatusResponse, code, subject string) string {
	for _, c := range st.GetDaemon().GetConditions() {
		if c.Code == code && c.Subject == subject {
			return c.Text
		}
	}
	return ""
}
