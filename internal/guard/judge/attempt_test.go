package judge

import "testing"

// TestAttemptIsPrintable: an intruder chooses names, and must not reach the terminal with them.
func TestAttemptIsPrintable(t *testing.T) {
	a := Attempt{Denied: true, Operation: "write", Path: "/srv/\x1b[2Jf", Program: "/tmp/\x07p", PID: 7, Comm: "c\nd", Rules: []string{"data"}}
	if got, want := a.String(), "00:00:00.000 denied write of /srv/?[2Jf by /tmp/?p (pid 7, c?d): rule data"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
