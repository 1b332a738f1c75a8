package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/broker"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"golang.org/x/sys/unix"
)

// way is one way to answer.
type way struct {
	name  string
	word  string // of c/subject.c
	lease bool   // from the UDP path
	inGo  bool
}

// ways are all, in the order of their turns and of the report. Ratios are to the one at reference.
var ways = []way{
	{name: "recvfrom, blocking", word: "recvfrom"},
	{name: "recvfrom, spinning", word: "recvfrom-spin"},
	{name: "recvmmsg, busy polling", word: "recvmmsg-busy"},
	{name: "AF_XDP sleeping, C", word: "sleep", lease: true},
	{name: "AF_XDP sleeping, Go", word: "sleep", lease: true, inGo: true},
	{name: "AF_XDP adaptive, C", word: "adaptive", lease: true},
	{name: "AF_XDP adaptive, Go", word: "adaptive", lease: true, inGo: true},
	{name: "AF_XDP spinning, C", word: "spin", lease: true},
	{name: "AF_XDP spinning, Go", word: "spin", lease: true, inGo: true},
}

const reference = 1

var server = netip.MustParseAddrPort("192.0.2.10:5000")

// bed is a client and a server.
type bed struct {
	lab            *lab.Lab
	client, server *lab.Host
	broker         *broker.Broker
	folder, socket string
	program        string // the subject in C
	cpus           [2]int // of the client and the subject; -1: any
}

func newBed(ctx context.Context) (b *bed, err error) {
	b = &bed{cpus: twoCPUs()}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.folder, err = os.MkdirTemp("", "shunt-udppath-"); err != nil {
		return b, err
	}
	if err := b.compile(ctx); err != nil {
		return b, err
	}
	if b.lab, err = lab.New(""); err != nil {
		return b, err
	}
	if b.client, err = b.lab.AddHost("client"); err != nil {
		return b, err
	}
	if b.server, err = b.lab.AddHost("server"); err != nil {
		return b, err
	}
	err = b.lab.Connect(lab.End{Host: b.client, Interface: "eth0", IPv4: netip.MustParsePrefix("192.0.2.1/24")},
		lab.End{Host: b.server, Interface: "eth0", IPv4: netip.PrefixFrom(server.Addr(), 24)}, lab.Cable{Queues: 1})
	if err != nil {
		return b, err
	}
	b.socket = filepath.Join(b.folder, "s")
	if b.broker, err = broker.Open(broker.Options{Socket: b.socket, In: b.server.Run}); err != nil {
		return b, err
	}
	return b, b.lab.Ready(ctx)
}

// compile makes the subject in C. The folder of the sources is that of the repository, where the command is run.
func (b *bed) compile(ctx context.Context) error {
	source := "bench/udppath/c/subject.c"
	if _, err := os.Stat(source); err != nil {
		source = "c/subject.c" // in a test
	}
	b.program = filepath.Join(b.folder, "subject")
	out, err := exec.CommandContext(ctx, "cc", "-O2", "-Wall", "-Wextra", "-o", b.program, source).CombinedOutput()
	if err != nil {
		return fmt.Errorf("compile %s: %w; install a C compiler, and run this in the folder of the repository\n%s", source, err, out)
	}
	return nil
}

func (b *bed) close() error {
	var errs []error
	if b.broker != nil {
		errs = append(errs, b.broker.Close())
	}
	if b.lab != nil {
		errs = append(errs, b.lab.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(b.folder))...)
}

// apart is whether client and subject have a CPU each.
func (b *bed) apart() bool { return b.cpus[0] >= 0 }

// start starts a subject, and returns when it answers.
func (b *bed) start(ctx context.Context, w way) (*lab.Process, error) {
	var offers []broker.Offer
	if w.lease {
		root := uint32(0)
		offers = []broker.Offer{{Name: "echo", Interface: "eth0", Addresses: []netip.AddrPort{server}, Mode: xsk.Auto, RingSize: 256, Transmit: true, Allow: []broker.Rule{{User: &root}}}}
	}
	if err := b.broker.Apply(offers); err != nil {
		return nil, err
	}
	args := []string{w.word, strconv.Itoa(b.cpus[1]), b.socket}
	cmd := b.server.Command(ctx, b.program, args...)
	if w.inGo {
		cmd = b.server.Command(ctx, "/proc/self/exe")
		cmd.Env = append(os.Environ(), subjectVariable+"="+strings.Join(args, " "))
	}
	p, err := cmd.Spawn()
	if err != nil {
		return nil, err
	}
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		select {
		case <-p.Ended:
			return nil, fmt.Errorf("the subject has ended: %s", p.Log())
		default:
		}
		if strings.Contains(p.Log(), "ready\n") {
			return p, nil
		}
		if time.Since(begin) > 20*time.Second {
			return nil, errors.Join(fmt.Errorf("the subject does not begin to answer: %s", p.Log()), p.End(unix.SIGKILL, time.Second))
		}
	}
}

// measure is a way's turn.
func (b *bed) measure(ctx context.Context, w way, each time.Duration) (r result, err error) {
	p, err := b.start(ctx, w)
	if err != nil {
		return r, err
	}
	var c *client
	err = b.client.Run(func() (err error) { c, err = newClient(server); return err })
	if err == nil {
		defer c.close()
		err = onCPU(b.cpus[0], func() error { r = c.measure(each); return ctx.Err() })
	}
	if err == nil && len(c.times) < least {
		err = fmt.Errorf("%d questions were answered within %s, and %d are needed", len(c.times), patience, least)
	}
	return r, errors.Join(err, p.End(unix.SIGTERM, 10*time.Second))
}
