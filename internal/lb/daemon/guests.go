package daemon

import (
	"slices"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath"
)

// showGuests adds other products' programs to what a status shows, where the balancer's hands on to them.
func (d *daemon) showGuests(attached []*shuntv1.Attachment) {
	for _, a := range attached {
		if kernel.Mode(a.Mode).AtTC() {
			continue
		}
		name, id, err := kernel.GuestBehind(a.Interface)
		if err != nil {
			d.log.Debug("a guest is not shown", "error", err) // the interface has just gone
			continue
		}
		if name == "" {
			continue
		}
		at := slices.IndexFunc(a.Chain, func(p *shuntv1.ChainedProgram) bool { return p.Position == string(datapath.PositionAfter) })
		if at < 0 {
			at = len(a.Chain)
		}
		a.Chain = slices.Insert(a.Chain, at, &shuntv1.ChainedProgram{Position: string(datapath.PositionGuest), Name: name, Id: id})
	}
}
