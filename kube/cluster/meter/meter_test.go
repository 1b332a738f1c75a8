package meter

import (
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/traffic"
)

func TestParse(t *testing.T) {
	busy, err := parse("cpu  1 20 300 4000 50000 600 7000 80000 9 9\ncpu0 1 1 1 1 1 1 1 1\n")
	if want := (1 + 20 + 300 + 600 + 7000) * 10 * time.Millisecond; err != nil || busy != want {
		t.Errorf("busy for %s, %v, want %s", busy, err, want)
	}
	for _, text := range []string{"", "cpu 1 2 3\n", "cpu0 1 2 3 4 5 6 7 8\n", "cpu 1 2 x 4 5 6 7 8\n", "cpu 1 2 -3 4 5 6 7 8\n"} {
		if _, err := parse(text); err == nil {
			t.Errorf("%q was read", text)
		}
	}
}

// TestCPUPerTransaction subtracts the CPU time that the machine uses anyway.
func TestCPUPerTransaction(t *testing.T) {
	s := Sample{Result: traffic.Result{Transactions: 1000, Seconds: 2}, Busy: 2500 * time.Millisecond}
	if got := s.CPUPerTransaction(0.25); got != 2*time.Millisecond {
		t.Errorf("%s", got)
	}
	s.Transactions = 0
	if got := s.CPUPerTransaction(0.25); got != 0 {
		t.Errorf("%s for none", got)
	}
}

// TestMeasure: a server of this process, and time that the machine has spent.
func TestMeasure(t *testing.T) {
	server, err := traffic.Serve(Here{}, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	// Long enough for more than one tick of work on a slow machine, whose other end shares the CPU.
	s, err := Measure(Here{}, traffic.CRR, server.Address, 200*time.Millisecond)
	if err != nil || s.Transactions == 0 || s.Busy <= 0 || s.Busy%(10*time.Millisecond) != 0 {
		t.Errorf("%+v, %v", s, err)
	}
}
