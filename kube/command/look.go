package command

import (
	"log/slog"

	"github.com/shunt-lb/shunt/kube/rival"
	"github.com/shunt-lb/shunt/kube/translate"
)

// looker returns a function that finds faults on this machine. It reports the places where it could not look.
func looker(node string, log *slog.Logger) func() []translate.Fault {
	return func() []translate.Fault {
		found, err := rival.Look()
		if err != nil {
			log.Warn("could not look for all traces of kube-proxy; that needs root", "error", err)
		}
		if fault, is := found.Fault(node); is {
			return []translate.Fault{fault}
		}
		return nil
	}
}
