package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/lab"
)

// task is a subject's task.
type task string

const (
	echoing   task = "echo"
	receiving task = "receive"
)

// peer is a receiver of others that this machine may have.
type peer struct {
	ready   string         // in its output, once it works
	taken   *regexp.Regexp // the number of datagrams that it received, in its output at the end
	command func(b *bed, t task) []string
	// find makes the files that command needs; the error names the missing files.
	find func(ctx context.Context, b *bed) error
}

var peers = map[string]peer{
	"libxdp": {
		ready: "ready\n", taken: took,
		command: func(b *bed, t task) []string {
			return []string{filepath.Join(b.folder, "libxdp"), string(t), strconv.Itoa(b.cpus[1]), "eth0"}
		},
		find: func(ctx context.Context, b *bed) error {
			return b.compile(ctx, "libxdp", "libxdp-dev and libbpf-dev, for libxdp", "-lxdp", "-lbpf")
		},
	},
	"testpmd": {
		ready: "Port statistics", taken: regexp.MustCompile(`(?s)Forward statistics for port 0.*?RX-packets: (\d+)`),
		command: func(b *bed, t task) []string {
			forward := map[task]string{echoing: "5tswap", receiving: "rxonly"}[t]
			// Standard output is a pipe, and testpmd is not to keep its lines to itself.
			return []string{"stdbuf", "-oL", "dpdk-testpmd", "--lcores", fmt.Sprintf("0@%d,1@%d", b.cpus[0], b.cpus[1]), "--no-pci", "--no-huge", "-m", "256", "--no-telemetry",
				"--file-prefix", filepath.Base(b.folder), "--vdev", "net_af_xdp0,iface=eth0,start_queue=0,queue_count=1",
				"--", "--forward-mode=" + forward, "--nb-cores=1", "--total-num-mbufs=16384", "--auto-start", "--stats-period=3600"}
		},
		find: func(_ context.Context, b *bed) error {
			for _, name := range []string{"dpdk-testpmd", "stdbuf"} {
				if _, err := exec.LookPath(name); err != nil {
					return fmt.Errorf("%w; Debian's package dpdk-dev has dpdk-testpmd", err)
				}
			}
			if !b.apart() {
				return errors.New("it needs two CPUs")
			}
			return nil
		},
	},
}

// took is the last line of a subject.
var took = regexp.MustCompile(`took (\d+)\n`)

// findPeers notes for each peer why this machine does not have it.
func (b *bed) findPeers(ctx context.Context) {
	b.missing = map[string]string{}
	for name, p := range peers {
		if err := p.find(ctx, b); err != nil {
			b.missing[name], _, _ = strings.Cut(err.Error(), "\n")
		}
	}
}

// compile makes a program of c. The folder of the sources is that of the repository, where the command is run. needs
// names the packages that the compiler needs.
func (b *bed) compile(ctx context.Context, name, needs string, libraries ...string) error {
	source := "bench/udppath/c/" + name + ".c"
	if _, err := os.Stat(source); err != nil {
		source = "c/" + name + ".c" // in a test
	}
	args := append([]string{"-O2", "-Wall", "-Wextra", "-o", filepath.Join(b.folder, name), source}, libraries...)
	out, err := exec.CommandContext(ctx, "cc", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("compile %s: %w; install %s, and run this in the folder of the repository\n%s", source, err, needs, out)
	}
	return nil
}

// takenOf reads the number of datagrams that a subject has received, after its end.
func takenOf(p *lab.Process, pattern *regexp.Regexp) (uint64, error) {
	found := pattern.FindStringSubmatch(p.Log())
	if found == nil {
		return 0, fmt.Errorf("the subject does not say how many datagrams it received: %s", p.Log())
	}
	return strconv.ParseUint(found[1], 10, 64)
}
