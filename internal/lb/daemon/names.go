package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lb/resolve"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/node"
)

// namesAwait is how long a change waits for names that are not known yet. What is not known then comes later.
const namesAwait = 3 * time.Second

const namesSuffix = ".names.json"

// namesPath is the file that keeps the addresses of an instance's names.
func namesPath(instance string) string {
	return filepath.Join(node.StateDirectory(), instance+namesSuffix)
}

// names are the backends that sources declare by name. Its methods are for the holder of d.changing.
type names struct {
	follower   *resolve.Follower
	conditions *condition.Set
	// declared is what sources with names have said, without the addresses.
	declared map[string]state.Declaration
	unusable map[string][]condition.Condition // by source
}

func newNames(follower *resolve.Follower, conditions *condition.Set) *names {
	return &names{follower: follower, conditions: conditions, declared: map[string]state.Declaration{}, unusable: map[string][]condition.Condition{}}
}

// questions are those of all sources.
func (n *names) questions() (all []resolve.Question) {
	for _, declared := range n.declared {
		all = append(all, resolve.Questions(declared.Services)...)
	}
	return all
}

// forget ends the look-ups of names that no source has.
func (n *names) forget() { n.follower.Follow(n.questions()) }

// expanded is declarations with the present addresses of their names. keep makes them the sources'; without keep,
// forget makes everything as it was.
func (n *names) expanded(ctx context.Context, declared []state.Declaration) (with []state.Declaration, keep func()) {
	var questions []resolve.Question
	for _, d := range declared {
		questions = append(questions, resolve.Questions(d.Services)...)
	}
	n.follower.Follow(append(n.questions(), questions...))
	if len(questions) > 0 {
		limited, cancel := context.WithTimeout(ctx, namesAwait)
		n.follower.Await(limited, questions)
		cancel()
	}
	unusable := make([][]condition.Condition, len(declared))
	with = slices.Clone(declared)
	for i := range with {
		with[i].Services, unusable[i] = resolve.Expand(declared[i].Services, n.follower.Answer)
	}
	keep = func() {
		for i, d := range declared {
			delete(n.declared, d.Source)
			if len(resolve.Questions(d.Services)) > 0 {
				n.declared[d.Source] = d
			}
			n.unusable[d.Source] = unusable[i]
		}
		var all []condition.Condition
		for _, some := range n.unusable {
			all = append(all, some...)
		}
		n.conditions.Only(condition.NameUnusable, all)
		n.forget() // what the declaration before had
		n.follower.Save()
	}
	return with, keep
}

// followNames carries out what the DNS says, until ctx ends. It is beside the loop, as reloads are.
func (d *daemon) followNames(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.names.follower.Changed():
			d.namesChanged(ctx)
		}
	}
}

func (d *daemon) namesChanged(ctx context.Context) {
	d.changing.Lock()
	defer d.changing.Unlock()
	for _, source := range slices.Sorted(maps.Keys(d.names.declared)) {
		declared := d.names.declared[source]
		before := d.writer.Snapshot().Revision
		difference, err := d.change(ctx, declared)
		if errors.Is(err, control.ErrStopping) || errors.Is(err, control.ErrDraining) {
			return
		}
		if err != nil {
			d.log.Error("the present addresses of names are not in use", "source", source, "error", err)
			d.conditions.Raise(condition.Condition{Code: condition.NameUnusable, Severity: condition.Error, Subject: "services of the source " + source,
				Text: fmt.Sprintf("the present addresses of their names are not in use, and those before stay: %v", err)})
			continue
		}
		if difference.Empty() {
			continue
		}
		d.changed(difference)
		if d.writer.Snapshot().Revision == before { // health or a next hop has changed meanwhile
			d.log.Debug("health carried out", "difference", difference.String())
			continue
		}
		d.log.Info("names have other addresses", "source", source, "difference", difference.String())
	}
}
