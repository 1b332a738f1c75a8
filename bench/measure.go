package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/bench/load"
)

// setting is a setting in which arms are compared.
type setting struct {
	Layout  string `json:"layout"`  // "two-arm" or "one-arm", see package bed
	Offload string `json:"offload"` // "off" or "default", see bed.SetOffload
}

// settings are all requested settings.
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

// measureArm puts an arm in place, measures the figures that are asked for, and removes the arm.
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
		err = fmt.Errorf("stop %s: %w", a.name, stopErr)
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
	return load.ParseWrk(out)
}

// latency measures answers at a fixed rate.
func (r *run) latency(ctx context.Context, a arm) (*load.Result, error) {
	return load.Start(func(program string, args ...string) (string, error) {
		return r.bed.Run(ctx, bed.Client, program, args...)
	}, load.Options{Target: a.target, Rate: r.options.rate, Connections: r.options.connections, Duration: r.options.keepalive})
}
