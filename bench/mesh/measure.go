package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/bench/load"
	"github.com/shunt-lb/shunt/internal/lab"
)

// wrkThreads is the number of wrk's threads.
const wrkThreads = 2

// sample is one arm's result in one round.
type sample struct {
	Arm       string  `json:"arm"`
	Round     int     `json:"round"`
	Keepalive float64 `json:"keepalive_per_s"` // requests, as fast as it goes
	Errors    int     `json:"errors"`          // of wrk
	// Latency is at each of the fixed rates.
	Latency []load.Result `json:"latency"`
}

// String is a sample for people who wait.
func (s sample) String() string {
	text := fmt.Sprintf("round %d  %-8s %8.0f requests/s, %d errors", s.Round, s.Arm, s.Keepalive, s.Errors)
	for _, l := range s.Latency {
		text += fmt.Sprintf("; at %d/s %.0f answered, p50 %.0f µs, p99 %.0f µs", l.Rate, l.Achieved, l.P50us, l.P99us)
	}
	return text
}

// measure puts an arm in place, takes its figures, and removes it.
func measure(ctx context.Context, o options, folder string, a arm) (s sample, err error) {
	t, err := newTrial(ctx, o, folder, a)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, t.close(context.WithoutCancel(ctx))) }()
	if s.Keepalive, s.Errors, err = t.wrk(ctx, a); err != nil {
		return s, err
	}
	for _, rate := range o.rates {
		latency, err := load.Start(func(program string, args ...string) (string, error) {
			return t.onClient(ctx, program, args...)
		}, load.Options{Target: a.target, Rate: rate, Connections: o.connections, Duration: o.duration, Overload: true})
		if err != nil {
			return s, err
		}
		s.Latency = append(s.Latency, *latency)
	}
	if err := t.await(ctx, a); err != nil {
		return s, fmt.Errorf("after the measurement: %w", err)
	}
	return s, nil
}

// onClient runs a program at the client, and returns its standard output.
func (t *trial) onClient(ctx context.Context, program string, args ...string) (string, error) {
	command := t.Client.Command(ctx, program, args...)
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s%s", program, strings.Join(args, " "), err, stdout.String(), stderr.String())
	}
	return stdout.String(), nil
}

func (t *trial) wrk(ctx context.Context, a arm) (float64, int, error) {
	out, err := t.onClient(ctx, "wrk", "-t"+strconv.Itoa(wrkThreads), "-c"+strconv.Itoa(t.connections),
		"-d"+strconv.Itoa(int(t.duration.Seconds()))+"s", "http://"+a.target.String()+"/")
	if err != nil {
		return 0, 0, err
	}
	return load.ParseWrk(out)
}

// await asks over new connections until all servers have answered, and each machine that balances reaches
// each server: then its health checks have found all of them.
func (t *trial) await(ctx context.Context, a arm) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var ways [][]*lab.Host
	if a.balances {
		for _, m := range t.Machines {
			ways = append(ways, []*lab.Host{m})
		}
	}
	for _, way := range append(ways, t.Machines) {
		if err := t.Lead(a.target.Addr(), way...); err != nil {
			return err
		}
		if err := t.awaitServers(ctx, a); err != nil {
			var logs strings.Builder
			for _, p := range t.children {
				fmt.Fprintf(&logs, "\n%s said:\n%s", p.Path, p.Log())
			}
			return fmt.Errorf("the router leads packets to %s and %d more: %w%s", way[0].Name(), len(way)-1, err, logs.String())
		}
	}
	return nil
}

// awaitServers asks until each server has answered.
func (t *trial) awaitServers(ctx context.Context, a arm) error {
	client, answered := t.Client.HTTPClient(false), map[string]bool{}
	var last error
	for len(answered) < len(t.Machines) {
		name, err := ask(ctx, client, a.target.String())
		if err == nil {
			answered[name] = true
			continue
		}
		last = err
		select {
		case <-ctx.Done():
			return fmt.Errorf("ask http://%s/ until each of %d servers has answered: only %v did; the last fault: %w",
				a.target, len(t.Machines), slices.Sorted(maps.Keys(answered)), last)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// ask makes one request, and returns which server answered.
func ask(ctx context.Context, client *http.Client, target string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+target+"/", nil)
	if err != nil {
		return "", err
	}
	reply, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer reply.Body.Close()
	body, err := io.ReadAll(reply.Body)
	if err == nil && reply.StatusCode != http.StatusOK {
		err = fmt.Errorf("answer %s %q", reply.Status, body)
	}
	return strings.TrimSpace(string(body)), err
}
