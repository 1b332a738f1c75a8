package daemon

import (
	"context"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// Source gives services beside the configuration file.
type Source struct {
	// Name is what messages call it. "file" is taken.
	Name string
	// Run calls replace with all services that the source wants, whenever they are others than
	// before, and returns soon after ctx has ended. At first it has none.
	//
	// replace returns once they are carried out. Its error says why they were refused, and then
	// those before stay; or that they are carried out in part, and then the rest is tried again
	// without the source. It may be a *state.ConflictError: another source has such a service.
	Run func(ctx context.Context, replace func([]model.Service) error)
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
	d.applying.Lock()
	defer d.applying.Unlock()
	if err := d.refusesChange(); err != nil {
		return err
	}
	difference, err := d.change(ctx, state.Declaration{Source: source, Services: services})
	if err != nil {
		return err
	}
	d.changed(difference)
	d.host.Summarize()
	d.log.Info("services replaced", "source", source, "difference", difference.String())
	return nil
}
