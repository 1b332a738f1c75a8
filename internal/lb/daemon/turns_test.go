package daemon

import (
	"errors"
	"testing"
	"testing/synctest"

	"github.com/shunt-lb/shunt/internal/control"
)

// TestTurns: a change begins when the one before has ended. When the daemon stops, the change under way ends, and
// waiting changes are refused, even if no caller waits for them to begin.
func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns, woken := newTurns(), make(chan struct{}, 1)
		owned := make(chan struct{}, 1)
		go turns.run(woken, func() { owned <- struct{}{} })
		woken <- struct{}{}
		<-owned

		begun, goOn, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		go func() {
			ended <- turns.take(func() {
				close(begun)
				<-goOn
			})
		}()
		<-begun
		second := make(chan error, 1)
		go func() {
			second <- turns.take(func() { t.Error("a change began while another one was under way, or after stop") })
		}()
		woken <- struct{}{}
		synctest.Wait()

		stopped := make(chan struct{})
		go func() {
			turns.stop()
			close(stopped)
		}()
		synctest.Wait()
		if err := <-second; !errors.Is(err, control.ErrStopping) {
			t.Errorf("the change that waited gave %v", err)
		}
		select {
		case <-stopped:
			t.Error("stop did not wait for the change under way")
		default:
		}
		close(goOn)
		<-stopped
		if err := <-ended; err != nil {
			t.Errorf("the change under way gave %v", err)
		}
		select {
		case <-owned:
			t.Error("a change of the daemon's own began after stop")
		default:
		}
		if err := turns.take(func() { t.Error("a change began after stop") }); !errors.Is(err, control.ErrStopping) {
			t.Errorf("a change after stop gave %v", err)
		}
	})
}
