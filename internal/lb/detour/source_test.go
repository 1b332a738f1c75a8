package detour

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestBriefly: an answer holds for a second, and answers of that time are not kept for longer.
func TestBriefly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b briefly[string, int]
		asked := 0
		ask := func() int { asked++; return asked }
		wants := func(key string, want int) {
			t.Helper()
			if got := b.get(key, ask); got != want {
				t.Errorf("%s at %s: answer %d, want %d", key, time.Now().Format(time.TimeOnly), got, want)
			}
		}
		wants("a", 1)
		wants("b", 2)
		time.Sleep(time.Second - time.Nanosecond)
		wants("a", 1)
		time.Sleep(time.Nanosecond)
		wants("a", 3)
		if len(b.known) != 1 {
			t.Errorf("%d answers are kept", len(b.known))
		}
	})
}
