package daemon

import (
	"errors"
	"log/slog"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/datapath"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/neighbour"
	"github.com/shunt-lb/shunt/internal/lb/route"
	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/value"
)

// plane is a data plane with the components that write to it and to nothing else. They are opened in the order
// of the fields. A component that was not opened is nil.
type plane struct {
	instance string
	log      *slog.Logger

	datapath   *datapath.Datapath
	loopback   *loopback
	sockets    *sockets
	server     *decapsulation
	interfaces *interfaces
	routes     *route.Routes
	announcer  *announcements

	encapsulates  func(model.Encapsulation) // see Options.Encapsulation; may be nil
	encapsulation model.Encapsulation       // the last one for encapsulates
}

// open loads the data plane, or adopts the data plane of a predecessor. want asks for the configuration to be
// applied again. After an error, the caller calls abandon.
func (p *plane) open(host *node.Host, limits model.Limits, writer *state.Writer, want func()) error {
	dp, err := datapath.Open(store.Options{Instance: p.instance, Limits: limits, Log: p.log})
	if err != nil {
		return err
	}
	p.datapath = dp
	// This must not come earlier: abandon undoes it only if there is a data plane.
	p.loopback = newLoopback(p.instance, p.log)
	p.sockets = newSockets(dp, p.instance, p.log)
	if p.server, err = newDecapsulation(dp, p.instance, p.log); err != nil {
		return err
	}
	p.interfaces = newInterfaces(dp, newOffloads(p.instance, host.Conditions, p.log), host.Conditions, p.log,
		func() { p.server.doubt(); p.routes.Review() })
	p.interfaces.serves = p.server.serves
	if p.routes, err = route.Open(route.Options{
		DataPlane: dp, Conditions: host.Conditions, Log: p.log, Host: p.interfaces.hopToHost, Attached: p.interfaces.indices,
		Configured:        func() []netip.Addr { return writer.Snapshot().Node.SNAT.Addresses },
		NATSourcesChanged: want, // a new source has to become one of our addresses
		Beat:              func() { host.Alive(partNextHops) },
	}); err != nil {
		return err
	}
	p.announcer = newAnnouncements(dp.SetOwned, host.Conditions, p.log)
	return nil
}

// set applies the settings of the machine's owner to the data plane.
func (p *plane) set(machine model.Node, ports value.PortRange) error {
	if err := p.datapath.SetSettings(machine.Timeouts, ports); err != nil {
		return err
	}
	p.datapath.SetEncapsulation(machine.Encapsulation)
	p.tellEncapsulation(machine.Encapsulation)
	if err := p.datapath.StampProbes(machine.StampProbes); err != nil {
		return err
	}
	return p.sockets.follow(machine.Sockets)
}

// tellEncapsulation calls encapsulates if the encapsulation is not the last one.
func (p *plane) tellEncapsulation(e model.Encapsulation) {
	if p.encapsulates != nil && e != p.encapsulation {
		p.encapsulation = e
		p.encapsulates(e)
	}
}

// followServer makes this machine a backend of the services that name it. turned reports whether it has become
// a backend, or has stopped being one.
func (p *plane) followServer(next *state.Snapshot) (turned bool, err error) {
	before := p.server.serves()
	err = p.server.follow(next, p.interfaces.list())
	if turned = p.server.serves() != before; turned {
		p.routes.Review() // the way to this machine itself is another one
	}
	return turned, err
}

// unreachable reports whether a backend is known to be unreachable, with direct return or without. A backend
// that is this machine, which decapsulates, is reached with direct return alone, unless its answers to NAT are seen.
func (p *plane) unreachable(direct bool, backend netip.Addr) bool {
	return p.routes.Unreachable(backend) || !direct && p.server.serves() && p.routes.Here(backend) && !p.interfaces.meetsAnswers()
}

// leave releases the data plane as SIGKILL would, but in order: the programs trust the next hops for as long as
// they may, and the log says that they go on, with the number of services.
func (p *plane) leave(services int) error {
	p.interfaces.notices.stop()
	errs := []error{p.announcer.close(true), p.routes.Close(true), p.sockets.close(true), p.datapath.Heartbeat()}
	p.server.beside.Close()
	since := time.Now()
	errs = append(errs, p.datapath.Close())
	p.log.Info(unattended(p.instance, services, since), "instance", p.instance)
	return errors.Join(errs...)
}

// takeDown removes the data plane. The components that attract traffic are removed first.
func (p *plane) takeDown() error {
	p.interfaces.notices.stop()
	p.server.beside.Close()
	return errors.Join(p.announcer.close(false), p.routes.Close(false), p.sockets.close(false), p.datapath.Close(),
		attach.Remove(p.instance, p.log), releaseAll(p.instance, p.log), releaseLoopback(p.instance, p.log), releaseServer(p.instance, p.log))
}

// abandon closes the components that were opened before a start failed. A predecessor's data plane continues
// unchanged.
func (p *plane) abandon() error {
	keep := p.datapath != nil && p.datapath.Adopted()
	var errs []error
	if p.interfaces != nil {
		p.interfaces.notices.stop()
	}
	if p.announcer != nil {
		errs = append(errs, p.announcer.close(keep))
	}
	if p.routes != nil {
		errs = append(errs, p.routes.Close(keep))
	}
	if p.sockets != nil {
		errs = append(errs, p.sockets.close(keep))
	}
	if p.server != nil {
		p.server.beside.Close()
	}
	if p.datapath != nil {
		errs = append(errs, p.datapath.Close())
		if !keep {
			errs = append(errs, attach.Remove(p.instance, p.log), releaseAll(p.instance, p.log), releaseLoopback(p.instance, p.log), releaseServer(p.instance, p.log))
		}
	}
	return errors.Join(errs...)
}

// remove removes the remains of a killed daemon: programs, maps, neighbours, group memberships and changed
// settings. The log names them.
func remove(instance string, log *slog.Logger) error {
	left := leftAnnounced(instance, log)
	if err := attach.Remove(instance, log); err != nil {
		return err
	}
	errs := []error{withdraw(left, log), releaseDetour(instance, log), releaseAll(instance, log), releaseLoopback(instance, log), releaseServer(instance, log)}
	neighbours, err := neighbour.New(neighbour.Options{Log: log})
	if err == nil {
		err = neighbours.Close(false) // takes a predecessor's entries along
	}
	return errors.Join(append(errs, err)...)
}
