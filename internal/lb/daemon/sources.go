package daemon

import (
	"context"
	"errors"
	"log/slog"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// Source declares services in addition to the configuration file.
type Source struct {
	// Name is the source's name in messages. "file" is taken.
	Name string
	// First returns the services that the source wants at the start. They are applied in one step with the
	// services of the file, so that a restart withdraws no service that continues. A service with a name or a
	// frontend of a file's service is left out, and the log says so. nil: the source has none yet.
	First func() []model.Service
	// FirstDecapsulation returns the source's part of direct return between nodes at the start, as Change has it. nil: the
	// source has none.
	FirstDecapsulation func() *model.Decapsulation
	// Run calls declare whenever the source wants other services than before, and returns soon after ctx has
	// ended.
	//
	// declare returns when the change is applied. Its error says why the change was refused, and then the
	// earlier services stay; or that it was applied in part, and then the rest is tried again without the
	// source. It may be a *state.ConflictError: another source has such a service.
	Run func(ctx context.Context, declare func(Change) error)
}

// Change is a change of a source's services. It is applied in one step, or not at all.
type Change struct {
	// Declare are services that are new or different. The others stay unchanged.
	Declare []model.Service
	// Withdraw are names of services that the source no longer wants.
	Withdraw []string
	// Whole says that Declare lists all services that the source wants.
	Whole bool
	// Decapsulation is this machine's part of direct return between the nodes of a cluster: see state.Declaration.
	Decapsulation *model.Decapsulation
}

// sourceFile is the configuration file's name as a source.
const sourceFile = "file"

// ofFile returns the declaration of the configuration file.
func ofFile(config model.Config) state.Declaration {
	return state.Declaration{Source: sourceFile, Node: &config.Node, Services: config.Services}
}

// first returns the declarations of all sources at the start, the file before the others. Services that
// conflict with services of an earlier source are left out.
func first(config model.Config, sources []Source, writer *state.Writer, log *slog.Logger) []state.Declaration {
	all := []state.Declaration{ofFile(config)}
	for _, source := range sources {
		if source.First == nil {
			continue
		}
		declared := state.Declaration{Source: source.Name, Services: source.First()}
		if source.FirstDecapsulation != nil {
			declared.Decapsulation = source.FirstDecapsulation()
		}
		for {
			_, err := writer.Try(append(all, declared)...)
			var conflict *state.ConflictError
			if !errors.As(err, &conflict) || conflict.Source != source.Name || conflict.Service == "" {
				break // another fault is reported for all services, when they are applied
			}
			log.Warn("a service is left out", "source", source.Name, "service", conflict.Service, "error", err)
			declared.Services = slices.DeleteFunc(slices.Clone(declared.Services), func(s model.Service) bool { return s.Name == conflict.Service })
		}
		all = append(all, declared)
	}
	return all
}
