package gate

import (
	"os"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/trial"
)

func TestMain(m *testing.M) {
	if trial.Operate(map[string]trial.Task{"gate": keep}) {
		return
	}
	os.Exit(m.Run())
}
