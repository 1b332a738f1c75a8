package daemon

import (
	"context"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/resolve"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/node"
)

// namesAwait is the time that a change waits for names that have no address yet. Addresses that arrive later
// are applied later.
const namesAwait = 3 * time.Second

const namesSuffix = ".names.json"

// namesPath returns the path of the file with the addresses of an instance's names.
func namesPath(instance string) string {
	return filepath.Join(node.StateDirectory(), instance+namesSuffix)
}

// follower knows the present addresses of names; see resolve.Follower.
type follower interface {
	Follow(questions []resolve.Question)
	Await(ctx context.Context, questions []resolve.Question)
	Answer(q resolve.Question) resolve.Answer
	Changed() <-chan struct{}
	Save()
	Close()
}

// names are the backends that sources declare by name. One change at a time may use its methods.
type names struct {
	follower   follower
	conditions *condition.Set
	// vips are the addresses of all services in force of a source.
	vips func(source string) map[netip.Addr]bool
	// declared are the services with names as their sources declared them, without the addresses; by source and
	// name.
	declared map[string]map[string]model.Service
	unusable map[string]map[string][]condition.Condition // by source and service
}

func newNames(follower follower, conditions *condition.Set, vips func(source string) map[netip.Addr]bool) *names {
	return &names{follower: follower, conditions: conditions, vips: vips,
		declared: map[string]map[string]model.Service{}, unusable: map[string]map[string][]condition.Condition{}}
}

// questions returns the questions of all sources.
func (n *names) questions() (all []resolve.Question) {
	for _, declared := range n.declared {
		all = append(all, resolve.Questions(slices.Collect(maps.Values(declared)))...)
	}
	return all
}

// forget ends the look-ups of names that no source has.
func (n *names) forget() { n.follower.Follow(n.questions()) }

// expanded returns declarations with the present addresses of their names. keep stores the declarations
// for their sources; a caller that does not call keep calls forget to restore the earlier state.
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
	unusable := make([]map[string][]condition.Condition, len(declared))
	with = slices.Clone(declared)
	for i := range with {
		with[i].Services, unusable[i] = n.expand(declared[i])
	}
	keep = func() {
		for i, d := range declared {
			n.note(d, unusable[i])
		}
		var all []condition.Condition
		for _, source := range slices.Sorted(maps.Keys(n.unusable)) {
			for _, service := range slices.Sorted(maps.Keys(n.unusable[source])) {
				all = append(all, n.unusable[source][service]...)
			}
		}
		n.conditions.Only(condition.NameUnusable, all)
		n.forget() // names of the earlier declaration
		n.follower.Save()
	}
	return with, keep
}

// expand returns the services of a declaration with the addresses of their names, and the unusable addresses,
// by service.
func (n *names) expand(d state.Declaration) (with []model.Service, unusable map[string][]condition.Condition) {
	var vips map[netip.Addr]bool
	for i := range d.Services {
		if len(d.Services[i].Names) == 0 {
			continue
		}
		if vips == nil {
			vips = map[netip.Addr]bool{}
			if d.Part {
				vips = n.vips(d.Source)
			}
			for _, s := range d.Services {
				for _, f := range s.Frontends {
					vips[f.Address] = true
				}
			}
			with, unusable = slices.Clone(d.Services), map[string][]condition.Condition{}
		}
		expanded, faults := resolve.Expand(d.Services[i:i+1], vips, n.follower.Answer)
		with[i] = expanded[0]
		if len(faults) > 0 {
			unusable[with[i].Name] = faults
		}
	}
	if with == nil {
		return d.Services, nil
	}
	return with, unusable
}

// note records which services of a declaration have names, and their unusable addresses.
func (n *names) note(d state.Declaration, unusable map[string][]condition.Condition) {
	declared, faults := n.declared[d.Source], n.unusable[d.Source]
	if declared == nil || !d.Part {
		declared = map[string]model.Service{}
	}
	if faults == nil || !d.Part {
		faults = map[string][]condition.Condition{}
	}
	for _, name := range d.Withdrawn {
		delete(declared, name)
		delete(faults, name)
	}
	for _, s := range d.Services {
		delete(declared, s.Name)
		delete(faults, s.Name)
		if len(s.Names) > 0 {
			declared[s.Name] = s
		}
	}
	maps.Copy(faults, unusable)
	n.declared[d.Source], n.unusable[d.Source] = declared, faults
	if len(declared) == 0 {
		delete(n.declared, d.Source)
		delete(n.unusable, d.Source)
	}
}

// declaration returns the services with names of a source, so that their names can be given addresses again.
func (n *names) declaration(source string) state.Declaration {
	declared := state.Declaration{Source: source, Part: true}
	for _, name := range slices.Sorted(maps.Keys(n.declared[source])) {
		declared.Services = append(declared.Services, n.declared[source][name])
	}
	return declared
}

// vipsOf returns the addresses of all services in force of a source.
func vipsOf(writer *state.Writer) func(source string) map[netip.Addr]bool {
	return func(source string) map[netip.Addr]bool {
		vips := map[netip.Addr]bool{}
		for _, s := range writer.Snapshot().Configured {
			if s.Source != source {
				continue
			}
			for _, f := range s.Frontends {
				vips[f.Address] = true
			}
		}
		return vips
	}
}
