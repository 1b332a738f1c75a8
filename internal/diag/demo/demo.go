// Package demo shows each diagnosing tool on a fault that the demo makes itself, and therefore knows: a disk that holds
// each write back, a network that is too slow for its packets, kernel memory that is taken and not given back, and a
// CPU with too much work.
//
// The faults are in processes, a loop device, network namespaces and a cgroup of the demo's own, and each tool looks at
// nothing else. The tools are the commands that a user types. Each line with a claim is a Claim, which is checked
// against the fault in this run.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/shunt-lb/shunt/internal/story"
)

// Options configure the demo.
type Options struct {
	Executable string    // of shunt, which the demo runs as tools and as workers
	Out        io.Writer // where the story is printed
}

// Facts are the demo's findings; `shunt demo diag -o json` prints them as JSON.
type Facts struct {
	OK      bool         `json:"ok"` // every claim is true
	Seconds float64      `json:"seconds"`
	Disk    Disk         `json:"disk"`
	Packet  Packet       `json:"packet"`
	Memory  Memory       `json:"memory"`
	CPU     CPU          `json:"cpu"`
	Claims  story.Claims `json:"claims"`
}

// demo is one run.
type demo struct {
	*story.Teller
	self  string // path of shunt
	id    string // of everything that the demo makes
	facts *Facts
	undo  []func() error // run in reverse order
}

// Run runs the whole demo. It cleans up before it returns. A step that failed, or a statement that turned out to be false, is a claim that
// makes Facts.OK false. The error is ctx's if ctx ended, or that of a failed cleanup.
func Run(parent context.Context, o Options) (*Facts, error) {
	d := &demo{Teller: story.NewTeller(o.Out), self: o.Executable, id: fmt.Sprintf("diag%d", os.Getpid()), facts: &Facts{}}
	begin := time.Now()
	d.Say("All objects of this demo have the name shunt-%s. If the demo is killed, `shunt demo --clean %s` removes them.\n", d.id, d.id)
	ctx, cancel := context.WithTimeoutCause(parent, time.Minute, errors.New("the demo took longer than a minute"))
	defer cancel()
	var cleaning error
	for _, part := range []struct {
		title string
		do    func(context.Context) error
	}{
		{"A disk is slow", d.slowDisk},
		{"A packet is late", d.latePacket},
		{"The kernel's memory grows", d.growingMemory},
		{"A task waits for a CPU", d.busyCPU},
	} {
		// If one tool cannot run here, the others are shown all the same.
		fault := d.Tell(ctx, story.Step(part.title, part.do))
		if fault != nil && parent.Err() == nil {
			d.Claim(false, "%v", fault)
		}
		cleaning = errors.Join(cleaning, d.cleanUp())
		if ctx.Err() != nil {
			break
		}
	}
	err := errors.Join(parent.Err(), cleaning)
	d.facts.Seconds = time.Since(begin).Seconds()
	d.facts.Claims = d.Claims
	d.facts.OK = err == nil && d.Claims.Untrue() == 0
	return d.facts, err
}

// atEnd registers a function that undoes something at the end of the step.
func (d *demo) atEnd(undo func() error) { d.undo = append(d.undo, undo) }

func (d *demo) cleanUp() error {
	var errs []error
	for i := len(d.undo) - 1; i >= 0; i-- {
		errs = append(errs, d.undo[i]())
	}
	d.undo = nil
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	return nil
}
