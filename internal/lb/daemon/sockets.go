package daemon

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/sock"
	"github.com/shunt-lb/shunt/internal/metrics"
	"github.com/shunt-lb/shunt/internal/value"
)

// lateSockets is the delay of a second walk through the sockets after a backend has gone: a connect() that had
// just got the backend may not have sent anything at the first walk, and does so within microseconds.
const lateSockets = time.Second

// sockets are the sockets of programs on this machine that are served. Its methods may be called at any time.
type sockets struct {
	datapath sock.DataPlane
	instance string
	log      *slog.Logger
	gone     chan struct{}                // a backend has gone, or is down, or has left a service
	members  atomic.Pointer[sock.Members] // not nil: sockets have not all been held against these

	mutex  sync.Mutex
	open   *sock.Sockets // nil: none are served
	cgroup string
}

func newSockets(dp sock.DataPlane, instance string, log *slog.Logger) *sockets {
	return &sockets{datapath: dp, instance: instance, log: log, gone: make(chan struct{}, 1)}
}

// follow makes the sockets agree with the configuration. If it fails, nothing has changed. The first call takes
// over a predecessor's programs, or removes them.
func (s *sockets) follow(wanted model.Sockets) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	switch {
	case wanted.Cgroup == s.cgroup && s.open != nil:
		return nil
	case wanted.Cgroup == "" && s.open != nil:
		err := s.open.Detach()
		s.open, s.cgroup = nil, ""
		s.members.Store(nil)
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
			s.log.Warn("cannot close the programs at the former cgroup", "error", err)
		}
	}
	s.open, s.cgroup = opened, wanted.Cgroup
	s.log.Info("serving sockets", "cgroup", wanted.Cgroup)
	s.want() // a backend may have gone while no daemon ran
	return nil
}

// outcomes returns all counters; none if no sockets are served.
func (s *sockets) outcomes() (all []metrics.Count, err error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.open == nil {
		return nil, nil
	}
	counted, err := s.open.Outcomes()
	if err != nil {
		return nil, err
	}
	for _, name := range sock.OutcomeNames() {
		all = append(all, metrics.Count{Of: name, Count: counted[name]})
	}
	return all, nil
}

// close ends the service of sockets. keep leaves the programs attached.
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

// run closes the sockets of backends that have gone, until ctx ends. A failure is tried again.
func (s *sockets) run(ctx context.Context) {
	var again <-chan time.Time
	for {
		last := false
		select {
		case <-ctx.Done():
			return
		case <-s.gone:
			again = time.After(lateSockets)
		case <-again:
			again, last = nil, true
		}
		if err := s.closeGone(last); err != nil {
			s.log.Error("cannot close all sockets of backends that are gone; trying again", "error", err)
			again = time.After(sweepInterval)
		}
	}
}

// closeGone closes sockets. After the last time, all sockets have been compared with the members of services.
func (s *sockets) closeGone(last bool) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.open == nil {
		return nil
	}
	members := s.members.Load()
	closed, err := s.open.CloseGone(members)
	if closed.Total() > 0 {
		s.log.Info("closed "+value.Counted(closed.Total(), "socket")+" whose backend is gone", "removed", closed.Gone, "down", closed.Down, "left the service", closed.Left)
	}
	if last && err == nil {
		s.members.CompareAndSwap(members, nil)
	}
	return err
}

// leave compares sockets with the backends that services have now. It waits for a walk that is under way.
func (s *sockets) leave(all []reconcile.Member, grace func() error) error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	if s.open == nil {
		return nil
	}
	members, err := s.open.Leave(all, grace)
	if err != nil {
		return err
	}
	s.members.Store(members)
	s.want()
	return nil
}

// through makes the reconciler's changes report when a backend goes.
func (s *sockets) through(maps reconcile.Maps) reconcile.Maps { return leaving{maps, s.want, s.leave} }

// leaving reports backends that go.
type leaving struct {
	reconcile.Maps
	tell  func()
	leave func(all []reconcile.Member, grace func() error) error
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

// EndStrays is called when backends may have left services that programs cannot give them to any more.
func (l leaving) EndStrays(members []reconcile.Member) error {
	if err := l.Maps.EndStrays(members); err != nil {
		return err
	}
	// The flows of packets have ended when this returns; flows of sockets are separate from them.
	return l.leave(members, l.Grace)
}
