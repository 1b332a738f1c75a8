package daemon

import (
	"fmt"

	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/value"
)

// cuts is a line for each service and backend that a change takes away with flows in use. services are those afterwards, and
// open are the flows before. Flows of a backend that leaves one of its services alone are not known apart.
func cuts(change reconcile.Difference, services []*model.Service, open datapath.OpenByName) (lines []string) {
	kept, stay := map[string]bool{}, map[string]bool{}
	for _, s := range change.Services {
		kept[s.TakesOver] = true
	}
	for _, s := range services {
		for _, b := range s.Backends {
			stay[b.BackendAddress.String()] = true
		}
	}
	byBackend := map[string]uint64{}
	for b, n := range open.Backends {
		byBackend[b.String()] = n
	}
	told := map[string]bool{}
	for _, s := range change.Services {
		if s.Change == reconcile.Removed && !kept[s.Name] {
			if n := open.Services[s.Name]; n > 0 {
				lines = append(lines, fmt.Sprintf("%s of service %s end with it", value.Counted(int(n), "open flow"), s.Name))
			}
			continue
		}
		for _, b := range s.BackendsRemoved {
			if n := byBackend[b]; n > 0 && !stay[b] && !told[b] {
				told[b] = true
				lines = append(lines, fmt.Sprintf("%s of backend %s end with it", value.Counted(int(n), "open flow"), b))
			}
		}
	}
	return lines
}

// tellCuts counts and logs what a change of the file will cut, before it does.
func (d *daemon) tellCuts(change reconcile.Difference, services []*model.Service) []string {
	open, err := d.datapath.CountOpen()
	if err != nil {
		d.log.Warn("cannot count the flows that a change ends", "error", err)
		return nil
	}
	lines := cuts(change, services, open)
	for _, line := range lines {
		d.log.Warn("about to change the services: " + line)
	}
	return lines
}
