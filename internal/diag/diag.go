// Package diag finds out which diagnosing tools this machine can run, and the losses of each of them
// here.
package diag

import (
	"github.com/shunt-lb/shunt/internal/diag/io"
	"github.com/shunt-lb/shunt/internal/diag/memleak"
	"github.com/shunt-lb/shunt/internal/diag/ping"
	"github.com/shunt-lb/shunt/internal/diag/sched"
	"github.com/shunt-lb/shunt/internal/diag/vdisk"
	"github.com/shunt-lb/shunt/sensor"
)

// Tool has the results of trying a tool's sensors.
type Tool struct {
	Name    string
	Results []sensor.Result
	Err     error // reason why the tool cannot run
}

// Examine tries all sensors of all tools.
func Examine(b sensor.BTF) []Tool {
	ofIO, errIO := io.Examine(b)
	ofPing, errPing := ping.Examine(b)
	ofRunq, errRunq := sched.ExamineRunQueues(b)
	ofIrqoff, errIrqoff := sched.ExamineStalls(b)
	ofMemleak, errMemleak := memleak.Examine(b)
	ofVdisk, errVdisk := vdisk.Examine(b, false)
	ofGuest, errGuest := vdisk.Examine(b, true)
	return []Tool{{"io", ofIO, errIO}, {"ping", ofPing, errPing}, {"runq", ofRunq, errRunq}, {"irqoff", ofIrqoff, errIrqoff},
		{"memleak", ofMemleak, errMemleak}, {"vdisk", ofVdisk, errVdisk}, {"vdisk --guest", ofGuest, errGuest}}
}
