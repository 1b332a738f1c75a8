package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/shunt-lb/shunt/internal/condition"
)

// products are the products that a node can run. Its methods are for one caller at a time, but for each,
// summary and states.
type products struct {
	all   []*slot
	host  *Host // except for Alive: each product has its own
	alive *liveness
}

// slot is a product with its instance, if it is open.
type slot struct {
	Product
	// waiting are the settings with which a product that failed is tried again. For an open product none are
	// kept: they hold the file's text and positions of everything in it.
	waiting any
	life    *life // of the present or last instance; nil: there was none

	mu       sync.RWMutex // held for reading while the instance is asked, and never while it opens or closes
	instance Instance     // nil: it is not open
	failed   error        // why it could not be opened, if the file names it
}

func newProducts(all []Product, host *Host, alive *liveness) *products {
	p := &products{host: host, alive: alive}
	for _, product := range all {
		p.all = append(p.all, &slot{Product: product})
	}
	return p
}

// get returns the instance, or nil. Only the caller that opens and closes may use it.
func (s *slot) get() Instance {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.instance
}

func (s *slot) set(i Instance, failed error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instance, s.failed = i, failed
}

// each calls every open instance, in the order of the products. An instance does not close meanwhile.
func (p *products) each(ask func(i Instance) error) error {
	var errs []error
	for _, s := range p.all {
		s.mu.RLock()
		if s.instance != nil {
			errs = append(errs, ask(s.instance))
		}
		s.mu.RUnlock()
	}
	return errors.Join(errs...)
}

// take returns a file's settings for the product, or nil. The map does not have it any more, so that it can be
// garbage while a change is applied.
func (s *slot) take(named map[string]any) (settings any) {
	settings = named[s.Name]
	delete(named, s.Name)
	return settings
}

// start opens the products that a file names, with their settings. A product that was Blocked is tried once more if
// another product has made room, as the UDP path does when it takes over an interface from a node that was killed.
// A failing product raises a condition; start fails only if none could be opened.
func (p *products) start(ctx context.Context, named map[string]any) error {
	var errs []error
	open := 0
	for _, s := range p.all {
		if named[s.Name] == nil && s.Unnamed != nil {
			if err := s.Unnamed(p.host.Instance, p.host.Log); err != nil {
				p.host.Log.Error("cannot remove the remains of a product that the file does not name", "product", s.Name, "error", err)
			}
		}
	}
	for _, s := range p.all {
		settings := s.take(named)
		if settings == nil {
			continue
		}
		if err := p.try(ctx, s, settings); err != nil {
			errs = append(errs, err)
			continue
		}
		open++
	}
	if open == 0 {
		return errors.Join(errs...)
	}
	for _, s := range p.all {
		var blocked Blocked
		if errors.As(s.failed, &blocked) && blocked.Freed() {
			p.again(ctx, s)
		}
		p.tell(s)
	}
	return nil
}

// open starts a product; a failure raises a condition.
func (p *products) open(ctx context.Context, s *slot, settings any) error {
	defer p.tell(s)
	return p.try(ctx, s, settings)
}

func (p *products) try(ctx context.Context, s *slot, settings any) error {
	s.life = p.alive.begin()
	host := *p.host
	host.Alive = s.life.beat
	i, err := s.Open(ctx, &host, settings)
	if s.waiting = nil; err != nil {
		i, s.waiting = nil, settings
		s.life.end()
	}
	s.set(i, err)
	return err
}

// tell keeps the condition of a product. Only the caller that opens and closes may use it.
func (p *products) tell(s *slot) {
	if s.failed == nil {
		p.host.Conditions.Clear(condition.ProductFailed, s.Name)
		return
	}
	p.host.Conditions.Raise(condition.Condition{Code: condition.ProductFailed, Subject: s.Name,
		Text: fmt.Sprintf("cannot start the product %s: %v", s.Name, s.failed)})
}

// shut ends a product that the file no longer has, or that ends with the node.
func (p *products) shut(s *slot, keep bool) error {
	i := s.get()
	s.waiting = nil
	s.set(nil, nil)
	p.tell(s)
	if i == nil {
		return nil
	}
	defer s.life.end()
	if err := i.Close(keep); err != nil {
		return fmt.Errorf("end the product %s: %w", s.Name, err)
	}
	return nil
}

// refuses returns the reason why the open products cannot have these settings, or nil.
func (p *products) refuses(named map[string]any) error {
	var errs []error
	for _, s := range p.all {
		if i, wanted := s.get(), named[s.Name]; i != nil && wanted != nil {
			errs = append(errs, i.Refuses(wanted))
		}
	}
	return errors.Join(errs...)
}

// apply puts a file into force, and takes its settings: products that it names open or get their settings,
// others close. A failing product does not affect the others.
func (p *products) apply(ctx context.Context, named map[string]any) (all []Difference, err error) {
	var errs []error
	for _, s := range p.all {
		settings, i := s.take(named), s.get()
		switch {
		case settings == nil && (i != nil || s.waiting != nil):
			errs = append(errs, p.shut(s, false))
			all = append(all, Difference{Text: fmt.Sprintf("- product %s", s.Name)})
		case settings == nil:
		case i == nil:
			if err := p.open(ctx, s, settings); err != nil {
				errs = append(errs, fmt.Errorf("start the product %s, which is tried again: %w", s.Name, err))
				continue
			}
			all = append(all, Difference{Text: fmt.Sprintf("+ product %s: %s", s.Name, s.get().Summary())})
		default:
			difference, err := i.Apply(ctx, settings)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			all = append(all, difference)
		}
	}
	return all, errors.Join(errs...)
}

// retry opens the products that the file names and that could not be opened. It reports whether anything has
// changed.
func (p *products) retry(ctx context.Context) (opened bool) {
	for _, s := range p.all {
		if s.waiting != nil && p.again(ctx, s) {
			opened = true
		}
	}
	return opened
}

// again tries to open a product that could not be opened.
func (p *products) again(ctx context.Context, s *slot) (opened bool) {
	if err := p.open(ctx, s, s.waiting); err != nil {
		return false // it is a condition already
	}
	p.host.Log.Info("a product that had failed has started", "product", s.Name, "does", s.get().Summary())
	return true
}

// close ends all products, the last one first.
func (p *products) close(keep bool) error {
	var errs []error
	for _, s := range slices.Backward(p.all) {
		errs = append(errs, p.shut(s, keep))
	}
	return errors.Join(errs...)
}

// drain makes the products accept nothing new. await returns when none of them has anything in use that would
// break, or when ctx ends.
func (p *products) drain() (await func(ctx context.Context)) {
	var draining []Drainer
	for _, s := range p.all {
		if d, can := s.get().(Drainer); can {
			d.Drain()
			draining = append(draining, d)
		}
	}
	return func(ctx context.Context) {
		var all sync.WaitGroup
		for _, d := range draining {
			all.Go(func() { d.AwaitDrained(ctx) })
		}
		all.Wait()
	}
}

// checkHost compares settings with this machine.
func (p *products) checkHost(named map[string]any) {
	for _, s := range p.all {
		wanted := named[s.Name]
		if wanted == nil {
			continue
		}
		if i, knows := s.get().(HostChecker); knows {
			i.CheckHost(wanted)
		} else if s.CheckHost != nil {
			s.CheckHost(wanted, HostCheck{})
		}
	}
}

// summary describes the products' work in a few words.
func (p *products) summary() string {
	var words []string
	for _, s := range p.states() {
		if s.failed == nil {
			words = append(words, s.summary)
		} else {
			words = append(words, s.name+" failed")
		}
	}
	return strings.Join(words, ", ")
}

// state is the state of a product that the file names.
type state struct {
	name, summary string
	failed        error // nil: it is open
}

// states returns the states of the products that are open or should be.
func (p *products) states() (all []state) {
	for _, s := range p.all {
		s.mu.RLock()
		switch {
		case s.instance != nil:
			all = append(all, state{name: s.Name, summary: s.instance.Summary()})
		case s.failed != nil:
			all = append(all, state{name: s.Name, failed: s.failed})
		}
		s.mu.RUnlock()
	}
	return all
}
