// Package file is the configuration file as a source of desired state. It turns one
// YAML file, or a directory of them, into a model.Config, and reports everything that
// is wrong with it at once, each fault with its place and a suggestion.
//
//	files ── config.Format.Read ──► document ── build ──► model.Config
//	                   │                │         │
//	                   └─── faults ◄────┴─────────┘
//	                   types, keys       meaning      host.go: this machine
//
// The format is written down once, as the structs and tags of format.go, in the language of
// package config. Other products have a section each at the top of the same file; their packages
// have its format and its meaning.
//
// Nothing here needs root or a daemon, and nothing is kept between calls.
package file

import (
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// format is what a configuration may hold: the keys of document, and the sections of other products.
var format = config.NewFormat[document](sections...)

// sections are the top-level keys of other products. No product has one yet.
var sections []config.Section

// Parsed is what a configuration says and what is wrong with it.
type Parsed struct {
	// Config is usable if and only if no fault is an error.
	Config model.Config
	// Products are the settings of the sections that the files have, by their keys, as each
	// section's build made them. The same holds for them.
	Products map[string]any
	// Faults are sorted by file, line and column.
	Faults []config.Fault

	faults     *config.Faults
	interfaces []config.Mark   // of Config.Interfaces
	backends   [][]config.Mark // of Config.Services[i].Backends
	list       config.Mark     // of interfaces as a whole
	groups     []config.Mark   // of Config.API.Group and ReadGroup
	unparsed   bool            // of a file nothing is known, so nothing can be missing
}

// Load reads a file, or a directory's *.yaml in the order of their names. In several
// files lists are appended to each other, and a value may be set in one only.
//
// The configuration is usable if and only if no fault is an error. All faults are
// reported, sorted by file, line and column; only the parser's own first one hides what
// comes after it. The error says that something could not be read, and nothing else.
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
	p := &Parsed{faults: &c.Faults, unparsed: c.Unparsed, Products: c.Products}
	if c.Said {
		p.build(c.Top.(*document))
	}
	p.Faults = p.faults.Sorted()
	return p, nil
}

// Schema is the JSON Schema of the file, for editors.
func Schema() []byte { return format.Schema("shunt configuration") }
