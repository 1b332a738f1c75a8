package node

import (
	"context"
	"fmt"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/message"
	"github.com/shunt-lb/shunt/internal/value"
)

// Plan is control.Handler's: what Reload would do now. Nothing changes, no condition and no count either.
func (n *node) Plan(ctx context.Context) (*shuntv1.ReloadResponse, error) {
	n.reading.Lock()
	defer n.reading.Unlock()
	defer returnMemory()
	result := &shuntv1.ReloadResponse{}
	contents, err := n.format.Read(n.opts.ConfigPath)
	if err != nil {
		result.Refused = err.Error()
		return result, nil
	}
	checkSettings(contents, HostCheck{})
	n.products.checkHost(contents.Settings)
	faults := contents.Faults.Sorted()
	result.Faults = message.Faults(faults)
	if config.HasErrors(faults) {
		result.Refused = "the file has errors"
		return result, nil
	}
	own := n.own(contents)
	changes := value.DifferentSettings(n.settings.Load().List(), own.List())
	for _, refuse := range []func() error{n.refuses, func() error { return needsRestart(changes) }, func() error { return n.products.refuses(contents.Settings) }} {
		if err := refuse(); err != nil {
			result.Refused = err.Error()
			return result, nil
		}
	}
	differences, err := n.products.foresee(ctx, contents.Settings)
	if err != nil {
		result.Refused = err.Error()
		return result, nil
	}
	describe(changes, differences, result)
	result.Planned = true
	return result, nil
}

// foresee is what apply would change. Of products that cannot say, what they have to do is said.
func (p *products) foresee(ctx context.Context, named map[string]any) (all []Difference, err error) {
	for _, s := range p.all {
		wanted, i := named[s.Name], s.get()
		foreseer, can := i.(Foreseer)
		switch {
		case wanted == nil && (i != nil || s.waiting != nil):
			all = append(all, Difference{Text: fmt.Sprintf("- product %s: everything of it ends", s.Name)})
		case wanted == nil:
		case i == nil:
			all = append(all, Difference{Text: fmt.Sprintf("+ product %s", s.Name)})
		case can:
			difference, err := foreseer.Foresee(ctx, wanted)
			if err != nil {
				return nil, err
			}
			all = append(all, difference)
		default:
			all = append(all, Difference{Text: fmt.Sprintf("? product %s: it does not say beforehand what would change", s.Name)})
		}
	}
	return all, nil
}
