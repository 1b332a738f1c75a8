package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/bench/load"
)

// setting is what arms are compared in.
type setting struct {
	Layout  string `json:"layout"`  // "two-arm" or "one-arm", see package bed
	Offload string `json:"offload"` // "off" or "default", see bed.SetOffload
}

// settings are all that are asked for.
func (o options) settings() (all []setting) {
	for _, layout := range o.layouts {
		for _, offload := range o.offloads {
			all = append(all, setting{layout, offload})
		}
	}
	return all
}

// sample is one measured figure of one arm, in one round.
type sample struct {
	Arm string `json:"arm"`
	setting
	Round int `json:"round"`
	// Keep-alive and connections are requests per second; 0 was not measured.
	Keepalive         float64      `json:"keepalive_per_s,omitempty"`
	Connections       float64      `json:"connections_per_s,omitempty"`
	KeepaliveErrors   int          `json:"keepalive_errors,omitempty"`
	ConnectionsErrors int          `json:"connections_errors,omitempty"`
	Latency           *load.Result `json:"latency,omitempty"`
	Bulk              *bulk        `json:"bulk,omitempty"`
	Error             string       `json:"error,omitempty"` // why the arm could not be measured
}

// measureArm puts an arm in place, measures what is asked for, and takes it away.
func (r *run) measureArm(ctx context.Context, a arm, s *sample) error {
	stop, alive, err := a.start(ctx, r)
	if err != nil {
		return err
	}
	err = r.bed.WaitHTTP(ctx, a.target, "ok\n", alive...)
	if err == nil {
		err = r.measureFigures(ctx, a, s)
	}
	if err == nil && len(alive) > 0 {
		err = r.bed.WaitHTTP(ctx, a.target, "ok\n", alive...) // it must have survived
	}
	if stopErr := stop(); err == nil && stopErr != nil {
		err = fmt.Errorf("stopping %s: %w", a.name, stopErr)
	}
	return err
}

// measureFigures takes the figures of an arm that is in place.
func (r *run) measureFigures(ctx context.Context, a arm, s *sample) (err error) {
	o := r.options
	if o.keepalive > 0 {
		if s.Keepalive, s.KeepaliveErrors, err = r.wrk(ctx, a, o.keepalive); err != nil {
			return err
		}
	}
	if o.bulk > 0 {
		if s.Bulk, err = r.bulkTransfers(ctx, a); err != nil {
			return err
		}
	}
	if o.rate > 0 {
		if s.Latency, err = r.latency(ctx, a); err != nil {
			return err
		}
	}
	if s.Round <= o.connectionRounds {
		s.Connections, s.ConnectionsErrors, err = r.wrk(ctx, a, o.duration, "-H", "Connection: close")
	}
	return err
}

// wrk runs wrk against an arm and returns requests per second and the number of errors.
func (r *run) wrk(ctx context.Context, a arm, d time.Duration, more ...string) (float64, int, error) {
	args := append([]string{"-t2", "-c" + strconv.Itoa(r.options.connections), "-d" + strconv.Itoa(int(d.Seconds())) + "s"}, more...)
	out, err := r.bed.Run(ctx, bed.Client, "wrk", append(args, "http://"+a.target.String()+"/")...)
	if err != nil {
		return 0, 0, err
	}
	return parseWrk(out)
}

var (
	wrkRate     = regexp.MustCompile(`(?m)^Requests/sec:\s+([0-9.]+)`)
	wrkSocket   = regexp.MustCompile(`Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)`)
	wrkStatuses = regexp.MustCompile(`Non-2xx or 3xx responses: (\d+)`)
)

// parseWrk reads wrk's report.
func parseWrk(out string) (rate float64, errors int, err error) {
	m := wrkRate.FindStringSubmatch(out)
	if m == nil {
		return 0, 0, fmt.Errorf("wrk's report has no Requests/sec:\n%s", out)
	}
	if rate, err = strconv.ParseFloat(m[1], 64); err != nil {
		return 0, 0, err
	}
	for _, expression := range []*regexp.Regexp{wrkSocket, wrkStatuses} {
		if m := expression.FindStringSubmatch(out); m != nil {
			for _, digits := range m[1:] {
				n, err := strconv.Atoi(digits)
				if err != nil {
					return 0, 0, err
				}
				errors += n
			}
		}
	}
	return rate, errors, nil
}

// loadCommand is the hidden first argument that makes this program the load generator: a
// process of its own, because its namespace is.
const loadCommand = "load-generator"

// latency measures answers at a fixed rate.
func (r *run) latency(ctx context.Context, a arm) (*load.Result, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	options, err := json.Marshal(load.Options{
		Target: a.target, Rate: r.options.rate, Connections: r.options.connections, Duration: r.options.keepalive,
	})
	if err != nil {
		return nil, err
	}
	out, err := r.bed.Run(ctx, bed.Client, self, loadCommand, string(options))
	if err != nil {
		return nil, err
	}
	var result load.Result
	if err := json.Unmarshal([]byte(out), &result); err != nil {
		return nil, fmt.Errorf("the load generator printed %q: %w", out, err)
	}
	return &result, nil
}

// generateLoad is the other side of latency.
func generateLoad(text string) error {
	var o load.Options
	if err := json.NewDecoder(strings.NewReader(text)).Decode(&o); err != nil {
		return err
	}
	result, err := load.Run(o)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}
