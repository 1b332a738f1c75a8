package daemon

import (
	"fmt"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
)

// uppersEvery is in which of the seconds it is looked for macvlans: listing all interfaces costs milliseconds
// on a machine with thousands of them.
const uppersEvery = 5

// followUppers has macvlans that take frames of services be conditions. One may come at any time: VRRP makes
// it when it starts. The caller holds d.applying.
func (d *daemon) followUppers() {
	all, err := localHost().Interfaces()
	if err != nil {
		d.log.Warn("it is not known whether macvlans take frames of services", "error", err)
		return
	}
	snapshot := d.writer.Snapshot()
	vips := map[netip.Addr]bool{}
	for _, s := range snapshot.Services {
		for _, f := range s.Frontends {
			vips[f.Address] = true
		}
	}
	var found []condition.Condition
	for _, u := range file.Uppers(snapshot.Node.Interfaces, func(a netip.Addr) bool { return vips[a] }, all) {
		if u.Severe {
			found = append(found, condition.Condition{Code: condition.MacvlanTakesFrames, Severity: condition.Error, Subject: u.Name, Text: u.Text, Remedy: u.Remedy})
		}
	}
	d.conditions.Only(condition.MacvlanTakesFrames, found)
}

// withUpper adds to an error of attaching to an interface that it is a macvlan, and what works there.
func withUpper(wanted model.Interface, err error) error {
	all, failed := localHost().Interfaces()
	if failed != nil {
		return err
	}
	for _, u := range file.Uppers([]model.Interface{wanted}, func(netip.Addr) bool { return false }, all) {
		if u.Name == wanted.Name {
			return fmt.Errorf("%w; %s; %s", err, u.Text, u.Remedy)
		}
	}
	return err
}
