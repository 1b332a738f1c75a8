package daemon

import (
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// uppersEvery is the number of seconds between two searches for macvlans: listing all interfaces costs
// milliseconds on a machine with thousands of them.
const uppersEvery = 5

// uppers raises a condition for each macvlan that takes frames of services. One caller at a time may use it.
type uppers struct {
	conditions *condition.Set
	log        *slog.Logger
	seconds    int // since the last look
}

// follow is called every second. A macvlan may appear at any time: VRRP makes one when it starts.
func (u *uppers) follow(snapshot *state.Snapshot) {
	if u.seconds = (u.seconds + 1) % uppersEvery; u.seconds != 0 {
		return
	}
	all, err := localHost().Interfaces()
	if err != nil {
		u.log.Warn("cannot list the interfaces, so a macvlan that takes frames of services is not found", "error", err)
		return
	}
	vips := map[netip.Addr]bool{}
	for _, s := range snapshot.Services {
		for _, f := range s.Frontends {
			if !f.Tunnelled() {
				vips[f.Address] = true
			}
		}
	}
	var found []condition.Condition
	for _, upper := range file.Uppers(snapshot.Node.Interfaces, func(a netip.Addr) bool { return vips[a] }, all) {
		if upper.Severe {
			found = append(found, condition.Condition{Code: condition.MacvlanTakesFrames, Severity: condition.Error, Subject: upper.Name, Text: upper.Text, Remedy: upper.Remedy})
		}
	}
	u.conditions.Only(condition.MacvlanTakesFrames, found)
}

// withUpper adds to an error of attaching to an interface that the interface is a macvlan, and which
// configuration works there.
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
