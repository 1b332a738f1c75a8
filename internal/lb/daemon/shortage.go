package daemon

import (
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// shortageHold is how long a shortage stays a condition after the last packet that met it: a shortage that
// comes and goes with the traffic would otherwise fill the log.
const shortageHold = time.Minute

// shortages are the shortages that programs can meet, and the reasons under which programs count them.
var shortages = []struct {
	code    string
	text    string
	reasons []string
}{
	{condition.FlowsFull, "there was no room for a new flow, or no room to track it as established", []string{"flows_full", "table_full"}},
	{condition.PortsShort, "a new flow found no free source port towards its backend, or took a port whose rest had not ended", []string{"ports_exhausted", "port_taken"}},
	{condition.RememberedFull, "there was no room, or no budget, to remember a flow whose slot changes", []string{"not_remembered"}},
	{condition.FramesRefused, "the kernel refused frames that the program had decided to send", []string{"tx_refused", "redirect_refused"}},
}

// shortageWatch turns growing counters into conditions. One caller at a time may use it.
type shortageWatch struct {
	subject string
	lasting condition.Lasting
	last    map[string]uint64 // packets by reason; nil before the first look
}

func newShortageWatch(subject string, conditions *condition.Set) *shortageWatch {
	return &shortageWatch{subject: subject, lasting: condition.Lasting{Set: conditions, Hold: shortageHold}}
}

// look compares with the last call. Packets that were counted before the first call do not matter.
func (w *shortageWatch) look(reasons map[string]kernel.Count, now time.Time) {
	before := w.last
	w.last = map[string]uint64{}
	for name, count := range reasons {
		w.last[name] = count.Packets
	}
	if before == nil {
		return
	}
	for _, s := range shortages {
		if slices.ContainsFunc(s.reasons, func(r string) bool { return w.last[r] > before[r] }) {
			w.lasting.See(condition.Condition{Code: s.code, Subject: w.subject, Text: s.text}, now)
		}
	}
	w.lasting.Pass(now)
}
