package daemon

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/value"
)

// departedHold is how long it stays a condition that flows were ended because their source was gone.
const departedHold = 10 * time.Minute

// followAddresses has the data plane follow what becomes of the host's own addresses: it must not answer for
// one that the host has, and flows keep the source that they have as long as the host has it. The caller holds
// d.applying.
func (d *daemon) followAddresses(now time.Time) {
	d.departed.Pass(now)
	if d.uppersDue = (d.uppersDue + 1) % uppersEvery; d.uppersDue == 0 {
		d.followUppers()
	}
	own, err := hostAddresses()
	if err != nil {
		d.log.Warn("the host's addresses cannot be followed", "error", err)
		return
	}
	if !maps.Equal(own, d.own) || d.ways.Expires(now) {
		d.retries.want()
	}
}

// forgetSources gives backends other sources, and ends the flows of those that are sources no more and no addresses
// of the host. It is reconcile.BeforeForgetting's.
func (d *daemon) forgetSources(sources []netip.Addr) error {
	d.ways.Rewrite()
	gone := slices.DeleteFunc(slices.Clone(sources), func(a netip.Addr) bool { return d.own[a] })
	for _, a := range gone {
		ended, err := d.datapath.EndSources([]netip.Addr{a})
		if ended > 0 {
			d.departed.See(condition.Condition{Code: condition.NATSourceGone, Severity: condition.Warning, Subject: a.String(),
				Text: fmt.Sprintf("NAT sent from this address, which is gone: %s ended, whose clients have to connect again", value.Counted(int(ended), "flow"))}, time.Now())
		}
		if err != nil {
			return err
		}
	}
	return nil
}
