package daemon

import (
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/datapath"
)

// shortageHold is how long a shortage stays a condition after the last packet that met it:
// one that comes and goes with the traffic would otherwise fill the log.
const shortageHold = time.Minute

// shortages are the conditions that programs meet, and the reasons by which they count them.
var shortages = []struct {
	code    string
	text    string
	reasons []string
}{
	{condition.FlowsFull, "there was no room for a new flow, or none to keep it as established", []string{"flows_full", "table_full"}},
	{condition.PortsShort, "a new flow found no free source port towards its backend, or took one that still rested", []string{"ports_exhausted", "port_taken"}},
	{condition.RememberedFull, "there was no room, or no budget, to remember a flow whose slot changes", []string{"not_remembered"}},
	{condition.FramesRefused, "the kernel refused frames that the program had decided to send", []string{"tx_refused", "redirect_refused"}},
}

// shortageWatch turns counters that grow into conditions. It is for one caller at a time.
type shortageWatch struct {
	subject    string
	conditions *condition.Set
	known      bool
	last       map[string]uint64    // packets by reason
	grew       map[string]time.Time // by code
}

// look compares with the look before. What was counted before the first one is history.
func (w *shortageWatch) look(reasons map[string]datapath.Count, now time.Time) {
	if !w.known {
		w.known, w.last, w.grew = true, map[string]uint64{}, map[string]time.Time{}
		for name, count := range reasons {
			w.last[name] = count.Packets
		}
		return
	}
	for _, s := range shortages {
		for _, reason := range s.reasons {
			count := reasons[reason].Packets
			if count > w.last[reason] {
				w.grew[s.code] = now
				w.conditions.Raise(condition.Condition{Code: s.code, Subject: w.subject, Text: s.text})
			}
			w.last[reason] = count
		}
		if at, ok := w.grew[s.code]; ok && now.Sub(at) >= shortageHold {
			delete(w.grew, s.code)
			w.conditions.Clear(s.code, w.subject)
		}
	}
}
