package node

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// interruptPause is the time after the first Ctrl-C from which another one counts as a second: a terminal and a
// wrapper such as `timeout` or a shell may both pass on the first.
const interruptPause = time.Second

// UntilTold returns a context that ends with SIGTERM or SIGINT, and one that ends with SIGINT alone. A second
// SIGINT calls exit at once, unless it comes together with the first; SIGTERM may be repeated.
func UntilTold(parent context.Context, exit func()) (stop, interrupted context.Context) {
	stop, stopping := context.WithCancel(parent)
	interrupted, interrupting := context.WithCancel(parent)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go obey(signals, time.Now, stopping, interrupting, exit)
	return stop, interrupted
}

// obey acts on signals.
func obey(signals <-chan os.Signal, now func() time.Time, stop, interrupt, exit func()) {
	var first time.Time // SIGINT
	for s := range signals {
		switch {
		case s != syscall.SIGINT:
		case first.IsZero():
			first = now()
			interrupt()
		case now().Sub(first) >= interruptPause:
			exit()
		}
		stop()
	}
}
