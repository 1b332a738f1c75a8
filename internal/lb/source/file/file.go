// Package file is the configuration file as a source of desired state. It turns one
// YAML file, or a directory of them, into a model.Config, and reports everything that
// is wrong with it at once, each fault with its position and a suggestion.
//
//	files ── config.Format.Read ──► document ── build ──► model.Config
//	                   │                │         │
//	                   └─── faults ◄────┴─────────┘
//	                   types, keys       meaning      host.go: this machine
//
// The balancer's keys are at the top of the file: Part has them, written down once as the structs and
// tags of format.go, in the language of package config. Other products have a section each in the same
// file, and package settings has the keys of no product.
//
// Nothing here needs root or a daemon, and nothing is kept between calls.
package file

import (
	_ "embed" // the sample

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/settings"
)

// Sample is a configuration that uses most of the balancer's format. It has no faults.
//
//go:embed sample.yaml
var Sample []byte

// Name is the name of the balancer's settings, of type *Parsed, among a configuration's.
const Name = "balancer"

// Part is the balancer's keys in a configuration.
var Part = config.NewTop(Name, func(doc *document, read *config.Contents) any { return build(doc, read, false) })

// PartBesideSources is the same for a balancer with other sources of services: a file need not have services. A file without
// any of the keys lacks interfaces, even if it names other products: nothing would serve these services.
var PartBesideSources = config.NewTop(Name, func(doc *document, read *config.Contents) any { return build(doc, read, true) }).Always()

// format is the format of a configuration without other products.
var format = config.NewFormat(Part, settings.Part)

// Parsed is the balancer's part of a configuration, with the configuration's faults.
type Parsed struct {
	// Config is usable if and only if no fault is an error.
	Config model.Config
	// Faults are sorted by file, line and column.
	Faults []config.Fault

	faults        *config.Faults
	interfaces    []config.Mark   // of Config.Interfaces
	backends      [][]config.Mark // of Config.Services[i].Backends
	needs         []need          // of health checks
	list          config.Mark     // of interfaces as a whole
	decapsulation config.Mark
	sources       bool // services come from elsewhere, too
	unparsed      bool // of a file nothing is known, so nothing can be missing
}

// build makes the balancer's settings.
func build(doc *document, read *config.Contents, sources bool) any {
	p := &Parsed{faults: &read.Faults, unparsed: read.Unparsed, sources: sources}
	p.build(doc, read)
	return p
}

// Load reads a file without other products, or a directory's *.yaml in the order of their names. In
// several files lists are appended to each other, and a value may be set in one only.
//
// The configuration is usable if and only if no fault is an error. All faults are
// reported, sorted by file, line and column; only the parser's own first one hides the faults
// after it. An error means only that a file could not be read.
func Load(path string) (model.Config, []config.Fault, error) {
	p, err := Read(path)
	if err != nil {
		return model.Config{}, nil, err
	}
	return p.Config, p.Faults, nil
}

// Read is Load, and keeps the positions that Parsed.CheckHost needs.
func Read(path string) (*Parsed, error) {
	c, err := format.Read(path)
	if err != nil {
		return nil, err
	}
	p, ok := c.Settings[Name].(*Parsed)
	if !ok {
		p = &Parsed{faults: &c.Faults}
	}
	p.Faults = p.faults.Sorted()
	return p, nil
}
