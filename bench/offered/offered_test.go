package main

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/bench/cpus"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/command"
)

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" { // the test's binary is shunt
		os.Exit(cli.Main(command.Alone, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// Each arm is a working Service, or the floor: newBed asks the backend through it from each flow's port, and has a frame of
// each flow come back with the right addresses and checksums.
func TestArms(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	for _, a := range arms {
		t.Run(a.name, func(t *testing.T) {
			b, err := newBed(t.Context(), a, cpus.Two(), []string{os.Args[0]})
			var none missing
			if errors.As(err, &none) {
				t.Skip(none)
			}
			if err != nil {
				t.Fatal(err)
			}
			taken, other, err := b.sink.Counts()
			if err == nil && (taken != flows || other != 0) {
				t.Errorf("%d frames and %d others came back, and %d were sent", taken, other, flows)
			}
			instance := filepath.Base(b.folder)
			if err := errors.Join(err, b.close()); err != nil {
				t.Fatal(err)
			}
			remains, err := filepath.Glob("/sys/fs/bpf/*/*" + instance + "*")
			labs, listErr := lab.IDs() // of all processes
			if err := errors.Join(err, listErr); err != nil || len(remains) > 0 || slices.Contains(labs, b.lab.ID()) {
				t.Errorf("left: %v, %v, the lab %s of %v", remains, err, b.lab.ID(), labs)
			}
		})
	}
}

// The proof fails for an arm that translates nothing, for frames that do not come back as they should, and for a frame with
// other addresses.
func TestBrokenArms(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	fails := func(b *bed, want string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*askAgain) // it asks once at least
		defer cancel()
		if err := b.prove(ctx); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want: %s", err, want)
		}
	}
	b, err := newBed(t.Context(), arms[0], cpus.Two(), nil)
	if err != nil {
		t.Fatal(err)
	}
	b.arm.floor = false
	if err := b.sink.SetOpen(false); err != nil {
		t.Error(err)
	}
	fails(b, "the backend does not answer")
	if err := b.checkSample(); err == nil || !strings.Contains(err.Error(), "a frame came back wrong") {
		t.Errorf("a frame of the floor was taken for a translated one: %v", err)
	}
	b.arm.floor = true
	if err := b.stopArm(); err != nil {
		t.Error(err)
	}
	b.stopArm = nil
	fails(b, "0 of 64 frames came back as they should")
	if err := b.close(); err != nil {
		t.Error(err)
	}
}

// A short round has a page with a row for each arm and load, and its figures agree with each other.
func TestQuick(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	o := brief()
	r, err := run(t.Context(), o, arms, os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	if err := r.page(&page, ""); err != nil {
		t.Fatal(err)
	}
	for _, a := range arms {
		rows := strings.Count(page.String(), "\n| "+a.name+" | ")
		if why := r.missing[a.name]; why != nil {
			if rows > 0 || !strings.Contains(page.String(), "- "+a.name+" had no turn: "+why.Error()) {
				t.Errorf("%s is missing (%v) and has %d rows, or the page does not say why", a.name, why, rows)
			}
			continue
		}
		if rows != 1+len(o.loads) {
			t.Errorf("%s has %d rows for %d loads", a.name, rows, len(o.loads))
		}
		for i, all := range r.results[a.name] {
			for _, one := range all {
				if one.Returned == 0 || one.unknown() > 0 || one.Offered > o.loads[i]*1.01 || one.Node <= 0 || one.each() <= 0 {
					t.Errorf("%s at %.0f: %+v", a.name, o.loads[i], one)
				}
			}
		}
	}
	if got := len(r.chart().Panels[0].Lines); got != len(r.arms) {
		t.Errorf("the plot has %d lines for %d arms", got, len(r.arms))
	}
	t.Log(page.String())
}

// Figures of one result follow from its counts.
func TestResult(t *testing.T) {
	r := result{Sent: 1000, Returned: 750, Full: 200, Late: 40, Offered: 2000, Forwarded: 1500, Node: 0.5}
	if lost := r.lost(); lost != 0.25 {
		t.Errorf("%v were lost", lost)
	}
	if n := r.unknown(); n != 10 {
		t.Errorf("%v are unknown", n)
	}
	if ns := r.each(); math.Abs(ns-1e9/3000) > 1 {
		t.Errorf("a packet takes %v ns", ns)
	}
	for _, bad := range []string{"", "x", "100,0", "-1"} {
		if loads, err := parseLoads(bad); err == nil {
			t.Errorf("%q: %v", bad, loads)
		}
	}
	if loads, err := parseLoads("100,1500"); err != nil || len(loads) != 2 || loads[1] != 1.5e6 {
		t.Errorf("%v, %v", loads, err)
	}
}
