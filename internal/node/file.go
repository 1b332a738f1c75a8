package node

import (
	"fmt"
	"log/slog"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/settings"
)

// Format describes the keys that a file may hold: the keys of every product, and of none.
func Format(products []Product) *config.Format {
	parts := make([]config.Part, 0, len(products)+1)
	for _, p := range products {
		parts = append(parts, p.Part)
	}
	return config.NewFormat(append(parts, settings.Part)...)
}

// Schema is the JSON Schema of such a file, for editors.
func Schema(products []Product) []byte { return Format(products).Schema("shunt configuration") }

// FaultsError means that the configuration file has faults. Its text is for a log; for a terminal,
// Faults are to be rendered.
type FaultsError struct {
	Path   string
	Faults []config.Fault
}

// Error says that the file was refused.
func (e *FaultsError) Error() string {
	return fmt.Sprintf("the configuration was refused, and nothing was changed; `shunt check --config %s` says the same", e.Path)
}

// CheckHost adds the faults that only this machine can find to a file's faults.
func CheckHost(products []Product, c *config.Contents, how HostCheck) {
	checkSettings(c, how)
	for _, p := range products {
		if s, named := c.Settings[p.Name]; named && p.CheckHost != nil {
			p.CheckHost(s, how)
		}
	}
}

func checkSettings(c *config.Contents, how HostCheck) {
	severity := config.SeverityWarning
	if how.Strict {
		severity = config.SeverityError
	}
	settings.CheckHost(c, severity, settings.LocalHost)
}

// readConfig reads the file for a start, and logs its warnings.
func readConfig(format *config.Format, products []Product, path string, log *slog.Logger) (*config.Contents, error) {
	c, err := format.Read(path)
	if err != nil {
		return nil, err
	}
	CheckHost(products, c, HostCheck{})
	faults := c.Faults.Sorted()
	if config.HasErrors(faults) {
		return nil, &FaultsError{Path: path, Faults: faults}
	}
	for _, fault := range faults {
		log.Warn("configuration", "fault", fault.String())
	}
	return c, nil
}
