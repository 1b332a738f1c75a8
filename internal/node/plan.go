package node

import (
	"context"
	"errors"
	"fmt"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/message"
)

// Plan implements control.Handler: it returns the changes that Reload would make now. Nothing changes, and no
// condition or counter does either.
func (n *node) Plan(ctx context.Context) (*shuntv1.ReloadResponse, error) {
	n.reading.Lock()
	defer n.reading.Unlock()
	defer returnMemory()
	result := &shuntv1.ReloadResponse{}
	if err := n.plan(ctx, result); err != nil {
		result.Refused = err.Error()
	}
	return result, nil
}

// plan writes the possible changes to result. The error is the reason why a reload would be refused.
func (n *node) plan(ctx context.Context, result *shuntv1.ReloadResponse) error {
	contents, err := n.readFile()
	if err != nil {
		return err
	}
	faults := contents.Faults.Sorted()
	result.Faults = message.Faults(faults)
	if config.HasErrors(faults) {
		return errors.New("the file has errors")
	}
	if err := n.refuses(); err != nil {
		return err
	}
	changes, err := n.changesTo(n.own(contents), contents.Settings)
	if err != nil {
		return err
	}
	differences, err := n.products.foresee(ctx, contents.Settings)
	if err != nil {
		return err
	}
	describe(changes, differences, result)
	result.Planned = true
	return nil
}

// foresee returns the changes that apply would make. A product that cannot foresee them is named.
func (p *products) foresee(ctx context.Context, named map[string]any) (all []Difference, err error) {
	for _, s := range p.all {
		wanted, i := named[s.Name], s.get()
		foreseer, can := i.(Foreseer)
		switch {
		case wanted == nil && (i != nil || s.waiting != nil):
			all = append(all, Difference{Text: fmt.Sprintf("- product %s: it ends, with all its work", s.Name)})
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
			all = append(all, Difference{Text: fmt.Sprintf("? product %s: it cannot tell its changes beforehand", s.Name)})
		}
	}
	return all, nil
}
