package node

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/control"
)

// TestLogOfVeryMany: a switch that fails is a line each for the first ten, and then few more; and
// no line reports the end of a condition that has not ended.
func TestLogOfVeryMany(t *testing.T) {
	var lines bytes.Buffer
	conditions := newConditions(slog.New(slog.NewTextHandler(&lines, nil)), &control.Events{})
	for i := range 1000 {
		conditions.Raise(condition.Condition{Code: condition.NeighbourUnresolved, Subject: fmt.Sprint("b", i), Text: "cannot send to it"})
	}
	log := lines.String()
	if n := strings.Count(log, "\n"); n != 17 || strings.Contains(log, "ended") || !strings.Contains(log, `"704 times: b0, b1, b10 and 701 more; b0: cannot send to it"`) {
		t.Errorf("the log has %d lines, want 17:\n%s", n, log)
	}
}
