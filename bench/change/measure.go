package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

const (
	iface    = "eth0"
	slotsMax = 1 << 24 // limits.slots at most
	// metricsAt is an address of the balancer's.
	metricsAt = "192.0.2.1:9470"
)

// figure is the cost of one thing.
type figure struct {
	what         string
	time, cpu    time.Duration
	memory, peak uint64 // of the daemon afterwards, in bytes; 0: no daemon
	answer       int    // size of the daemon's answer in bytes; 0: not counted
}

// subject is the daemon that is measured.
type subject struct {
	options
	host     *lab.Host
	daemon   *lab.Process
	config   string // path
	instance string
}

// measure starts the daemon and makes changes, in a lab of its own.
func measure(ctx context.Context, o options) (figures []figure, err error) {
	folder, err := os.MkdirTemp("", "shunt-change-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	l, err := lab.New("")
	if err != nil {
		return nil, err
	}
	defer func() {
		if closing := l.Close(); err == nil {
			err = closing
		}
	}()
	s := &subject{options: o, config: filepath.Join(folder, "shunt.yaml"), instance: "change-" + l.ID()}
	if s.host, err = build(l); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.stop(context.WithoutCancel(ctx))) }()
	return s.all(ctx)
}

// build lays the cable between balancer and router, and routes all backends over it.
func build(l *lab.Lab) (balancer *lab.Host, err error) {
	balancer, err = l.AddHost("balancer")
	if err != nil {
		return nil, err
	}
	router, err := l.AddHost("router")
	if err != nil {
		return nil, err
	}
	own, via := netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("192.0.2.2/24")
	err = l.Connect(lab.End{Host: balancer, Interface: iface, IPv4: own},
		lab.End{Host: router, Interface: iface, IPv4: via}, lab.Cable{})
	if err != nil {
		return nil, err
	}
	return balancer, balancer.AddRoute(lab.Route{To: netip.MustParsePrefix("10.0.0.0/8"), Via: via.Addr()})
}

func (s *subject) all(ctx context.Context) ([]figure, error) {
	var figures []figure
	add := func(f figure, err error) error {
		figures = append(figures, f)
		return err
	}
	if err := s.write(0); err != nil {
		return nil, err
	}
	if err := add(s.command(ctx, "`shunt check`", "check", "--config", s.config)); err != nil {
		return nil, err
	}
	if err := add(s.start(ctx, "start, until `shunt status` answers")); err != nil {
		return nil, err
	}
	for _, change := range []struct {
		what string
		make func(ctx context.Context, round int) (figure, error)
	}{
		{"`shunt reload`, one weight changed", func(ctx context.Context, round int) (figure, error) {
			if err := s.write(round + 1); err != nil {
				return figure{}, err
			}
			return s.command(ctx, "", "reload")
		}},
		{"`shunt reload`, nothing changed", func(ctx context.Context, _ int) (figure, error) {
			return s.command(ctx, "", "reload")
		}},
		{"`shunt backend weight`", func(ctx context.Context, round int) (figure, error) {
			return s.command(ctx, "", "backend", "weight", backend(1<<16+s.backends).String()+":8080", strconv.Itoa(20+round))
		}},
		{"`shunt status`", func(ctx context.Context, _ int) (figure, error) {
			return s.command(ctx, "", "status", "--instance", s.instance)
		}},
		{"a scrape of the metrics, %.1f MB", func(ctx context.Context, _ int) (figure, error) { return s.scrape(ctx) }},
		{"the daemon killed: start, until `shunt status` answers", func(ctx context.Context, _ int) (figure, error) {
			if err := s.daemon.End(syscall.SIGKILL, time.Minute); err != nil {
				return figure{}, err
			}
			return s.start(ctx, "")
		}},
	} {
		var rounds []figure
		for round := range s.rounds {
			f, err := change.make(ctx, round)
			if err != nil {
				return nil, err
			}
			rounds = append(rounds, f)
		}
		slices.SortFunc(rounds, func(a, b figure) int { return int(a.cpu - b.cpu) })
		median := rounds[len(rounds)/2]
		median.what = change.what
		if median.answer > 0 {
			median.what = fmt.Sprintf(change.what, float64(median.answer)/1e6)
		}
		figures = append(figures, median)
	}
	return figures, nil
}

// scrape asks for the metrics, and reads them to the end. Answers from before the daemon's first count of the
// open flows are not measured.
func (s *subject) scrape(ctx context.Context) (figure, error) {
	for {
		f, whole, err := s.scrapeOnce(ctx)
		if err != nil || whole {
			return f, err
		}
		select {
		case <-ctx.Done():
			return f, ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

func (s *subject) scrapeOnce(ctx context.Context) (f figure, whole bool, err error) {
	before, err := s.cpu()
	if err != nil {
		return f, false, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+metricsAt+"/metrics", nil)
	if err != nil {
		return f, false, err
	}
	client := s.host.HTTPClient(false)
	begun := time.Now()
	answer, err := client.Do(request)
	if err != nil {
		return f, false, err
	}
	defer answer.Body.Close()
	text := make([]byte, max(answer.ContentLength, 0)) // to grow it would take longer than to read
	if _, err = io.ReadFull(answer.Body, text); err != nil || answer.StatusCode != http.StatusOK {
		return f, false, fmt.Errorf("scrape %s: status %s: %w", metricsAt, answer.Status, err)
	}
	f.time = time.Since(begun)
	after, err := s.cpu()
	if err != nil {
		return f, false, err
	}
	f.cpu, f.answer = after-before, len(text)
	return f, bytes.Contains(text, []byte("\nshunt_service_flows_open{")), s.remember(&f)
}

// write writes the configuration, in which one backend has a weight by the round.
func (s *subject) write(round int) error {
	return os.WriteFile(s.config, []byte(configuration(s.options, s.services/2, 10+round)), 0o600)
}

// start runs the daemon until it answers.
func (s *subject) start(ctx context.Context, what string) (f figure, err error) {
	f.what = what
	begun := time.Now()
	command := s.host.Command(ctx, s.shunt, "run", "--config", s.config, "--instance", s.instance, "--socket", s.config+".sock")
	command.Env = append(os.Environ(), "STATE_DIRECTORY="+filepath.Dir(s.config)) // overrides are kept there
	s.daemon, err = command.Spawn()
	if err != nil {
		return f, err
	}
	for !strings.Contains(s.daemon.Log(), "msg=running") {
		select {
		case <-s.daemon.Ended:
			return f, fmt.Errorf("run %s: %w\n%s", s.shunt, s.daemon.Err(), s.daemon.Log())
		case <-time.After(time.Millisecond):
		}
	}
	f.time = time.Since(begun)
	f.cpu, err = s.cpu()
	if err != nil {
		return f, err
	}
	return f, s.remember(&f)
}

// command runs a command of the program, and counts the time that it and the daemon use until it ends.
func (s *subject) command(ctx context.Context, what string, arguments ...string) (figure, error) {
	f := figure{what: what}
	before, err := s.cpu()
	if err != nil {
		return f, err
	}
	if s.daemon != nil {
		arguments = append(arguments, "--socket", s.config+".sock")
	}
	command := s.host.Command(ctx, s.shunt, arguments...)
	begun := time.Now()
	out, err := command.CombinedOutput()
	f.time = time.Since(begun)
	if err != nil {
		return f, fmt.Errorf("shunt %s: %w\n%.1000s", strings.Join(arguments, " "), err, out)
	}
	after, err := s.cpu()
	if err != nil {
		return f, err
	}
	f.cpu = after - before + command.ProcessState.UserTime() + command.ProcessState.SystemTime()
	return f, s.remember(&f)
}

// cpu is the daemon's CPU time so far.
func (s *subject) cpu() (time.Duration, error) {
	if s.daemon == nil {
		return 0, nil
	}
	return s.daemon.CPUTime()
}

// remember notes the size of the daemon's memory.
func (s *subject) remember(f *figure) error {
	if s.daemon == nil {
		return nil
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.daemon.Process.Pid))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		for name, into := range map[string]*uint64{"VmRSS:": &f.memory, "VmHWM:": &f.peak} {
			if value, is := strings.CutPrefix(line, name); is {
				if _, err := fmt.Sscanf(value, "%d kB", into); err != nil {
					return fmt.Errorf("read the daemon's memory: %w", err)
				}
				*into *= 1024
			}
		}
	}
	return nil
}

// stop ends the daemon, which removes its data plane, and removes the remains of a daemon that was killed.
func (s *subject) stop(ctx context.Context) error {
	if s.daemon == nil {
		return nil
	}
	err := s.daemon.End(syscall.SIGTERM, time.Minute)
	if err == nil {
		return nil
	}
	if out, failed := s.host.Command(ctx, s.shunt, "detach", "--instance", s.instance).CombinedOutput(); failed != nil {
		err = errors.Join(err, fmt.Errorf("shunt detach: %w\n%s", failed, out))
	}
	return err
}
