package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/shunt-lb/shunt/internal/guard/decoy"
	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// DecoysName is the feature's name in the status.
const DecoysName = "decoys"

// decoys is a *decoy.Watch that is at work. The decoys themselves stay without it.
type decoys struct {
	agent *Agent
	watch *decoy.Watch // nil: off
	since time.Time
	parts int
	run   run
	ended struct{ events, lost uint64 } // counts of watches before this one
}

func (f *decoys) prepare(p policy.Policy) (step, error) {
	if len(p.Decoys) == 0 {
		return step{take: func() error { f.agent.warn(f.leave()); return nil }}, nil
	}
	folders, left, err := decoy.Find(p.Decoys)
	if err != nil {
		return step{}, err
	}
	var own []string // shunt's own commands put decoys back
	if path, err := os.Executable(); err == nil {
		own = append(own, path)
	}
	next, err := decoy.NewWatch(decoy.Options{Folders: folders, State: f.agent.options.Folder, Trust: own})
	if err != nil {
		return step{}, err
	}
	store, err := decoy.Open(f.agent.options.Decoys)
	if err != nil {
		return step{}, errors.Join(err, next.Close())
	}
	return step{
		take: func() error {
			f.take(store, next, len(p.Decoys), append(left, next.Unwatched()...))
			return nil
		},
		drop: func() error { return errors.Join(store.Close(), next.Close()) },
	}, nil
}

// take makes the wanted decoys, starts the next watch before the last one ends, and removes decoys that are not wanted any more.
func (f *decoys) take(store *decoy.Store, next *decoy.Watch, parts int, left []string) {
	wanted := map[string]bool{}
	for _, folder := range next.Folders() {
		wanted[folder] = true
	}
	made, err := store.Make(next.Folders())
	f.agent.warn(err)
	for _, text := range append(left, made.Left...) {
		f.agent.warn(fmt.Errorf("no decoy in %s", text))
	}
	next.Mark(store.Decoys())
	before, ending := f.watch, f.run
	f.watch, f.parts = next, parts
	f.run = begin(f.agent.failed, func(ctx context.Context) error {
		return next.Run(ctx, func(found detect.Found) error {
			f.agent.queue.put(DecoysName, Line{Found: &found})
			return nil
		})
	})
	if before == nil {
		f.since = time.Now()
	} else {
		f.agent.warn(f.finish(before, ending))
	}
	f.agent.warn(f.remove(store, func(folder string) bool { return wanted[folder] }))
}

// remove removes the decoys that keep does not want, reports the ones that stay nevertheless, and closes the store.
func (f *decoys) remove(store *decoy.Store, keep func(folder string) bool) error {
	gone, err := store.Remove(keep)
	for _, text := range gone.Left {
		f.agent.warn(fmt.Errorf("a decoy is no longer in the policy, but stays: %s", text))
	}
	return errors.Join(err, store.Close())
}

// finish ends a watch.
func (f *decoys) finish(w *decoy.Watch, r run) error {
	r.stop()
	s := w.Status()
	f.ended.events, f.ended.lost = f.ended.events+s.Events, f.ended.lost+s.Lost
	return w.Close()
}

// leave switches the feature off: the policy has no decoys any more.
func (f *decoys) leave() error {
	if f.watch == nil {
		return nil
	}
	err := f.end()
	store, bad := decoy.Open(f.agent.options.Decoys)
	if bad != nil {
		return errors.Join(err, bad)
	}
	return errors.Join(err, f.remove(store, nil))
}

func (f *decoys) end() error {
	if f.watch == nil {
		return nil
	}
	w := f.watch
	f.watch = nil
	return f.finish(w, f.run)
}

func (f *decoys) status() Feature {
	s := Feature{Name: DecoysName, Events: f.ended.events, Lost: f.ended.lost}
	if f.watch != nil {
		d := f.watch.Status()
		s.On, s.Since, s.Rules, s.Decoys = true, f.since, f.parts, &d
		s.Events, s.Lost = s.Events+d.Events, s.Lost+d.Lost
	}
	return s
}
