package daemon

import (
	"context"
	"errors"
	"log/slog"
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// Source gives services beside the configuration file.
type Source struct {
	// Name is the source's name in messages. "file" is taken.
	Name string
	// First returns the services that the source wants at the start. They are carried out in one
	// step with those of the file, so that a restart withdraws none that go on. One that has a name
	// or a frontend of the file's is left out, and the log says so. nil: the source has none yet.
	First func() []model.Service
	// Run calls declare whenever the source wants something else than before, and returns soon after
	// ctx has ended.
	//
	// declare returns once it is carried out. Its error says why it was refused, and then
	// the services before stay; or that it is carried out in part, and then the rest is tried again
	// without the source. It may be a *state.ConflictError: another source has such a service.
	Run func(ctx context.Context, declare func(Change) error)
}

// Change is a new wish of a source. It is carried out in one step, or not at all.
type Change struct {
	// Declare is services that are new or different. The others stay as they are.
	Declare []model.Service
	// Withdraw is names of services that are wanted no more.
	Withdraw []string
	// Whole: Declare is all that the source wants.
	Whole bool
}

// sourceFile is the configuration file's name as a source.
const sourceFile = "file"

// ofFile is the declaration of the configuration file.
func ofFile(config model.Config) state.Declaration {
	return state.Declaration{Source: sourceFile, Node: &config.Node, Services: config.Services}
}

// first are the declarations of all sources at the start, the file before the others. Services that meet
// those of a source before are left out.
func first(config model.Config, sources []Source, writer *state.Writer, log *slog.Logger) []state.Declaration {
	all := []state.Declaration{ofFile(config)}
	for _, source := range sources {
		if source.First == nil {
			continue
		}
		declared := state.Declaration{Source: source.Name, Services: source.First()}
		for {
			_, err := writer.Try(append(all, declared)...)
			var conflict *state.ConflictError
			if !errors.As(err, &conflict) || conflict.Source != source.Name {
				break // of another fault all are told, when all is carried out
			}
			log.Warn("a service is left out", "source", source.Name, "service", conflict.Service, "error", err)
			declared.Services = slices.DeleteFunc(slices.Clone(declared.Services), func(s model.Service) bool { return s.Name == conflict.Service })
		}
		all = append(all, declared)
	}
	return all
}
