package daemon

import (
	"context"
	"errors"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// Source gives services beside the configuration file.
type Source struct {
	// Name is what messages call it. "file" is taken.
	Name string
	// First returns the services that the source wants at the start. They are carried out in one
	// step with those of the file, so that a restart withdraws none that go on. One that has a name
	// or a frontend of the file's is left out, and the log says so. nil: the source has none yet.
	First func() []model.Service
	// Run calls replace with all services that the source wants, whenever they are others than
	// before, and returns soon after ctx has ended.
	//
	// replace returns once they are carried out. Its error says why they were refused, and then
	// those before stay; or that they are carried out in part, and then the rest is tried again
	// without the source. It may be a *state.ConflictError: another source has such a service.
	Run func(ctx context.Context, replace func([]model.Service) error)
}

// first is what all sources declare at the start, the file before the others. Services that meet
// those of a source before are left out.
func (d *daemon) first(config model.Config) []state.Declaration {
	all := []state.Declaration{ofFile(config)}
	for _, source := range d.opts.Sources {
		if source.First == nil {
			continue
		}
		declared := state.Declaration{Source: source.Name, Services: source.First()}
		for {
			_, err := d.writer.Try(append(all, declared)...)
			var conflict *state.ConflictError
			if !errors.As(err, &conflict) || conflict.Source != source.Name {
				break // of another fault all are told, when all is carried out
			}
			d.log.Warn("a service is left out", "source", source.Name, "service", conflict.Service, "error", err)
			declared.Services = slices.DeleteFunc(slices.Clone(declared.Services), func(s model.Service) bool { return s.Name == conflict.Service })
		}
		all = append(all, declared)
	}
	return all
}

// startSources has the sources beside the file speak from now on. They end with ctx.
func (d *daemon) startSources(ctx context.Context) {
	for _, source := range d.opts.Sources {
		d.running.Go(func() {
			source.Run(ctx, func(services []model.Service) error { return d.replace(ctx, source.Name, services) })
		})
	}
}

// replace makes services all that a source wants, as Reload does with the file.
func (d *daemon) replace(ctx context.Context, source string, services []model.Service) error {
	d.changing.Lock()
	defer d.changing.Unlock()
	difference, err := d.change(ctx, state.Declaration{Source: source, Services: services})
	if err != nil {
		return err
	}
	d.changed(difference)
	d.host.Summarize()
	d.log.Info("services replaced", "source", source, "difference", difference.String())
	return nil
}
