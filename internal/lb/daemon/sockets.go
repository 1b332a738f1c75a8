package daemon

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/sock"
	"github.com/shunt-lb/shunt/internal/value"
)

// lateSockets is when sockets are looked through once more after a backend has gone: a connect() that
// had just been given it may not have sent anything by the first time, and does within microseconds.
const lateSockets = time.Second

// sockets are the sockets of programs on this machine that are served. Its methods may be called at
// any time.
type sockets struct {
	datapath sock.DataPlane
	instance string
	log      *slog.Logger
	gone     chan struct{} // a backend has gone, or is down

	mutex  sync.Mutex
	open   *sock.Sockets // nil: none are served
	cgroup string
}

func newSockets(dp sock.DataPlane, instance string, log *slog.Logger) *sockets {
	return &sockets{datapath: dp, instance: instance, log: log, gone: make(chan struct{}, 1)}
}

// follow makes it as the configuration says. When it fails, it is as it was. The first call takes over
// what a predecessor has left, or away.
func (s *sockets) follow(wanted model.Sockets) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	switch {
	case wanted.Cgroup == s.cgroup && s.open != nil:
		return nil
	case wanted.Cgroup == "" && s.open != nil:
		err := s.open.Detach()
		s.open, s.cgroup = nil, ""
		return err
	case wanted.Cgroup == "":
		return sock.Remove("", s.instance)
	}
	if err := sock.CheckCgroup(wanted.Cgroup); err != nil {
		return err
	}
	opened, err := sock.Open(sock.Options{Instance: s.instance, Cgroup: wanted.Cgroup, DataPlane: s.datapath, Log: s.log})
	if err != nil {
		return err
	}
	if s.open != nil {
		if err := s.open.Close(); err != nil {
			s.log.Warn("cannot let go of the programs at the cgroup of before", "error", err)
		}
	}
	s.open, s.cgroup = opened, wanted.Cgroup
	s.log.Info("serving sockets", "cgroup", wanted.Cgroup)
	s.want() // a backend may have gone while no daemon ran
	return nil
}

// close ends it. keep leaves the programs in place.
func (s *sockets) close(keep bool) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.open == nil {
		return nil
	}
	opened := s.open
	s.open, s.cgroup = nil, ""
	if keep {
		return opened.Close()
	}
	return opened.Detach()
}

func (s *sockets) want() {
	select {
	case s.gone <- struct{}{}:
	default:
	}
}

// run closes the sockets of backends that have gone, until ctx ends. What fails is tried again.
func (s *sockets) run(ctx context.Context) {
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.gone:
			again = time.After(lateSockets)
		case <-again:
			again = nil
		}
		if err := s.closeGone(); err != nil {
			s.log.Error("sockets of a backend that is gone may be open still; it is tried again", "error", err)
			again = time.After(sweepInterval)
		}
	}
}

func (s *sockets) closeGone() error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.open == nil {
		return nil
	}
	closed, err := s.open.CloseGone()
	if closed > 0 {
		s.log.Info("closed " + value.Counted(closed, "socket") + " whose backend is gone")
	}
	return err
}

// through has the reconciler's changes say when a backend goes.
func (s *sockets) through(maps reconcile.Maps) reconcile.Maps { return leaving{maps, s.want} }

// leaving tells of backends that go.
type leaving struct {
	reconcile.Maps
	tell func()
}

func (l leaving) DeleteBackend(ref reconcile.BackendRef) error {
	err := l.Maps.DeleteBackend(ref)
	l.tell()
	return err
}

func (l leaving) PutBackend(record reconcile.BackendRecord) error {
	err := l.Maps.PutBackend(record)
	if record.Down {
		l.tell()
	}
	return err
}
