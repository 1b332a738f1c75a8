package daemon

import (
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/metrics"
	"github.com/shunt-lb/shunt/internal/value"
)

// natFlows handles the flows of full NAT by their source addresses; see datapath.Datapath and route.Routes.
type natFlows struct {
	// rewrite gives backends the present sources.
	rewrite func()
	// end ends the flows of sources.
	end func(sources []netip.Addr) (ended uint64, err error)
	// expires reports whether a source has to be left out from now on.
	expires func(now time.Time) bool
}

// addresses follows the host's own addresses: the data plane must not answer for them, and flows of full NAT
// keep a source as long as the host has it. One caller at a time may use it, except for count and applied.
type addresses struct {
	flows    natFlows
	departed condition.Lasting // sources that are gone, with the flows that ended
	log      *slog.Logger
	list     func() (map[netip.Addr]bool, error) // hostAddresses

	own     map[netip.Addr]bool          // as last applied
	sources atomic.Pointer[[]netip.Addr] // of full NAT, as last applied
}

func newAddresses(flows natFlows, conditions *condition.Set, log *slog.Logger) *addresses {
	return &addresses{flows: flows, departed: condition.Lasting{Set: conditions, Hold: lossHold}, log: log, list: hostAddresses}
}

// read returns the host's present addresses. differ compares with them from then on.
func (a *addresses) read() (map[netip.Addr]bool, error) {
	own, err := a.list()
	if err == nil {
		a.own = own
	}
	return own, err
}

// differ is called every second. It reports whether the configuration has to be applied again, because the
// host's addresses have changed or a source has expired.
func (a *addresses) differ(now time.Time) bool {
	a.departed.Pass(now)
	own, err := a.list()
	if err != nil {
		a.log.Warn("cannot read the host's addresses; changes of them are not found", "error", err)
		return false
	}
	return !maps.Equal(own, a.own) || a.flows.expires(now)
}

// forget gives backends other sources, and ends the flows of sources that the host no longer has. It implements
// reconcile.BeforeForgetting.
func (a *addresses) forget(sources []netip.Addr) error {
	a.flows.rewrite()
	gone := slices.DeleteFunc(slices.Clone(sources), func(s netip.Addr) bool { return a.own[s] })
	for _, source := range gone {
		ended, err := a.flows.end([]netip.Addr{source})
		if ended > 0 {
			a.departed.See(condition.Condition{Code: condition.NATSourceGone, Severity: condition.Warning, Subject: source.String(),
				Text: fmt.Sprintf("NAT sent from this address, which is gone: %s ended, whose clients have to connect again", value.Counted(int(ended), "flow"))}, time.Now())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// applied returns the sources of full NAT, as last applied.
func (a *addresses) applied() []netip.Addr {
	if sources := a.sources.Load(); sources != nil {
		return *sources
	}
	return nil
}

// count counts the sources of full NAT by family.
func (a *addresses) count() []metrics.Count {
	var v4, v6 uint64
	for _, source := range a.applied() {
		if source.Is4() {
			v4++
		} else {
			v6++
		}
	}
	return []metrics.Count{{Of: "ipv4", Count: v4}, {Of: "ipv6", Count: v6}}
}
