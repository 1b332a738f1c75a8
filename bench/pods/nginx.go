package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	benchbed "github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
)

const (
	wrkConnections = 16
	startTime      = 20 * time.Second // more than nginx takes on a busy machine
)

// nginxPair is nginx in front of nginx, on a host's loopback interface.
//
//	wrk ─► proxy, port ─► server, port + 1
type nginxPair struct {
	host   *lab.Host
	cgroup string // of all three; empty: this process's
	port   int
	ends   []*lab.Process
}

// within is a program in the pair's cgroup.
func (n *nginxPair) within(program string, args ...string) *lab.Command {
	if n.cgroup == "" {
		return n.host.Command(context.Background(), program, args...)
	}
	return n.host.Command(context.Background(), "sh", append([]string{"-c", `echo $$ > "$0/cgroup.procs" && exec "$@"`, n.cgroup, program}, args...)...)
}

// start starts both, and returns when they answer.
func (n *nginxPair) start(folder string) error {
	for i, name := range []string{"server", "proxy"} {
		at := filepath.Join(folder, fmt.Sprintf("%s-%d", name, n.port))
		if err := os.Mkdir(at, 0o700); err != nil {
			return err
		}
		c := benchbed.Nginx{Workers: 1, Listen: fmt.Sprintf("127.0.0.1:%d", n.port+1), Answer: "ok", PID: filepath.Join(at, "pid"), ErrorLog: filepath.Join(at, "log"), Folder: at}
		if i == 1 {
			c.Listen, c.Upstream = fmt.Sprintf("127.0.0.1:%d", n.port), fmt.Sprintf("127.0.0.1:%d", n.port+1)
		}
		config := filepath.Join(at, "conf")
		if err := os.WriteFile(config, []byte(c.Config()), 0o600); err != nil {
			return err
		}
		p, err := n.within("nginx", "-c", config, "-e", c.ErrorLog).Spawn()
		if err != nil {
			return err
		}
		n.ends = append(n.ends, p)
		if err := awaitPort(n.host, c.Listen, p); err != nil {
			return err
		}
	}
	return nil
}

// awaitPort waits until a process listens.
func awaitPort(host *lab.Host, at string, p *lab.Process) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	for {
		c, err := host.Dial(ctx, "tcp", at)
		if err == nil {
			return c.Close()
		}
		select {
		case <-p.Ended:
			return fmt.Errorf("nginx has ended: %w\n%s", p.Err(), p.Log())
		case <-ctx.Done():
			return fmt.Errorf("nginx does not listen at %s: %w", at, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (n *nginxPair) close() (err error) {
	for _, p := range n.ends {
		err = errors.Join(err, p.End(syscall.SIGTERM, startTime))
	}
	return err
}

// measure is the number of requests a second that the pair answers.
func (n *nginxPair) measure(duration time.Duration) (float64, error) {
	seconds := max(1, int(duration.Seconds()))
	out, err := n.within("wrk", "-t1", fmt.Sprintf("-c%d", wrkConnections), fmt.Sprintf("-d%ds", seconds), "http://"+net.JoinHostPort("127.0.0.1", strconv.Itoa(n.port))+"/").CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("wrk: %w\n%s", err, out)
	}
	if strings.Contains(string(out), "Socket errors") || strings.Contains(string(out), "Non-2xx") {
		return 0, fmt.Errorf("wrk had errors:\n%s", out)
	}
	_, after, found := strings.Cut(string(out), "Requests/sec:")
	if !found || len(strings.Fields(after)) == 0 {
		return 0, fmt.Errorf("wrk reported no rate:\n%s", out)
	}
	return strconv.ParseFloat(strings.Fields(after)[0], 64)
}

// nginxRow is one way of nginx in front of nginx.
type nginxRow struct {
	Way    string    `json:"way"`
	Rounds []float64 `json:"rounds"` // requests a second
}

// compareNginx measures a pair with plain sockets and one with paired sockets in turn, and prints a table.
func compareNginx(host *lab.Host, rounds int, duration time.Duration) (rows []nginxRow, err error) {
	if err := errors.Join(benchbed.Need(benchbed.Program{Name: "nginx", Package: "nginx-light"}, benchbed.Program{Name: "wrk", Package: "wrk"}), host.SetUp("lo", true)); err != nil {
		return nil, err
	}
	folder, err := os.MkdirTemp("", "shunt-pods-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	cgroup, remove, err := lab.MakeCgroup(fmt.Sprintf("shunt-bench-nginx-%d", os.Getpid()))
	if err != nil {
		return nil, err
	}
	defer func() {
		left := remove()
		for end := time.Now().Add(startTime); left != nil && time.Now().Before(end); left = remove() {
			time.Sleep(10 * time.Millisecond) // its last process may be ending
		}
		err = errors.Join(err, left)
	}()
	pairs, err := sockets.Open(sockets.Options{Cgroups: []string{cgroup}, Limit: sockets.LimitDefault})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, pairs.Close()) }()
	rows = []nginxRow{{Way: "plain"}, {Way: "sockets"}}
	all := []*nginxPair{{host: host, port: 8080}, {host: host, cgroup: cgroup, port: 8090}}
	for _, n := range all {
		defer func() { err = errors.Join(err, n.close()) }()
		if err := n.start(folder); err != nil {
			return nil, err
		}
	}
	for range rounds {
		for i, n := range all {
			rate, err := n.measure(duration)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", rows[i].Way, err)
			}
			rows[i].Rounds = append(rows[i].Rounds, rate)
		}
	}
	counts, err := pairs.Counts()
	if err != nil {
		return nil, err
	}
	if counts["taken"].Packets == 0 {
		return nil, fmt.Errorf("nginx to nginx: nothing went from socket to socket: %v", counts)
	}
	printNginx(rows)
	fmt.Printf("  %d messages went from socket to socket\n", counts["taken"].Packets)
	return rows, nil
}

func printNginx(rows []nginxRow) {
	fmt.Printf("nginx to nginx on loopback, wrk with %d connections\n", wrkConnections)
	for _, r := range rows {
		var ratios []float64
		for i, rate := range r.Rounds {
			ratios = append(ratios, rate/rows[0].Rounds[i])
		}
		rate, _, _ := traffic.Median(r.Rounds)
		ratio, lowest, highest := traffic.Median(ratios)
		fmt.Printf("  %-8s %10.0f requests/s  %4.2f [%4.2f to %4.2f]\n", r.Way, rate, ratio, lowest, highest)
	}
}
