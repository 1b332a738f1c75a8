package node

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"
)

// supervisor is the service manager that has started the daemon: systemd, or another that speaks sd_notify(3).
// Without one, the methods do nothing.
type supervisor struct {
	log *slog.Logger
	// silence is the time without a sign of life after which the manager kills the daemon; 0: it does not.
	silence time.Duration
	alive   liveness
	stuck   string // the part that was last logged as stuck; only the main loop uses it
}

// partSilenceMin is the least time that a part may be silent. The loop for next hops takes 5 s.
const partSilenceMin = 15 * time.Second

func newSupervisor(log *slog.Logger) *supervisor {
	silence, err := systemd.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("cannot tell the watchdog that shunt is alive; the watchdog will kill it", "error", err)
	}
	return &supervisor{log: log, silence: silence, alive: liveness{limit: max(silence, partSilenceMin)}}
}

// tell passes states on, as sd_notify(3) defines them.
func (s *supervisor) tell(states ...string) {
	if _, err := systemd.SdNotify(false, strings.Join(states, "\n")); err != nil {
		s.log.Warn("cannot tell the service manager about a state", "state", strings.Join(states, " "), "error", err)
	}
}

func (s *supervisor) ready(status string) {
	s.tell(systemd.SdNotifyReady, "STATUS="+status)
}

// reloading must be followed by ready. By the time, the manager distinguishes this reload from others.
func (s *supervisor) reloading() {
	s.tell(systemd.SdNotifyReloading, systemd.SdNotifyMonotonicUsec(), "STATUS=applying the configuration")
}

// stopping requests the time that stopping may take.
func (s *supervisor) stopping(status string, atMost time.Duration) {
	s.tell(systemd.SdNotifyStopping, "STATUS="+status, fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", atMost.Microseconds()))
}

// live reports that the daemon is alive, unless a part of it is not. The main loop calls it, and so reports for
// itself.
func (s *supervisor) live() {
	part, silent := s.alive.stuck()
	if part != "" {
		if s.stuck != part {
			s.log.Error("a part of the daemon makes no progress: shunt no longer tells the watchdog that it is alive",
				"part", part, "silent", silent.Round(time.Millisecond), "watchdog", s.silence)
		}
		s.stuck = part
		return
	}
	if s.stuck != "" {
		s.log.Info("the part makes progress again", "part", s.stuck)
		s.stuck = ""
	}
	if s.silence > 0 {
		s.tell(systemd.SdNotifyWatchdog)
	}
}

// liveness knows whether the parts of the daemon, besides the main loop, make progress. A product has a life
// while it is open.
type liveness struct {
	limit time.Duration // the time for which a part may be silent
	mu    sync.Mutex
	lives map[*life]bool
}

// life is the liveness of a product: the parts that have reported progress, and the time of their last report.
type life struct {
	of   *liveness
	last map[string]time.Time
}

func (l *liveness) begin() *life {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lives == nil {
		l.lives = map[*life]bool{}
	}
	one := &life{of: l, last: map[string]time.Time{}}
	l.lives[one] = true
	return one
}

// end records that the product has gone, and that no part of it has to report. Later reports do not count.
func (l *life) end() {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	delete(l.of.lives, l)
}

// beat records a part's progress; the first report makes the part known.
func (l *life) beat(part string) {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	l.last[part] = time.Now()
}

// stuck returns a part that has been silent for too long, or "".
func (l *liveness) stuck() (part string, silent time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for one := range l.lives {
		for name, last := range one.last {
			if since := time.Since(last); since > l.limit && since > silent {
				part, silent = name, since
			}
		}
	}
	return part, silent
}
