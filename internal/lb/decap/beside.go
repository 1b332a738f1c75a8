package decap

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/vishvananda/netlink"
)

// DataPlane is a balancer's programs, as Beside needs them; see datapath.Datapath.
type DataPlane interface {
	Decapsulate(iface string, tunnelled bool, load func(shared map[string]*ebpf.Map, index uint32) (*ebpf.Program, error)) error
	StopDecapsulating(iface string) error
}

// Beside decapsulates on interfaces with a balancer's program, which passes it packets that may belong to a
// tunnel. One caller at a time may use its methods.
type Beside struct {
	plane    DataPlane
	log      *slog.Logger
	programs map[string]*besideProgram // by interface
}

// besideProgram is sh_decap behind the program of an interface.
type besideProgram struct {
	*Program
	of Wanted
}

// Wanted lists the tunnels to decapsulate.
type Wanted struct {
	VIPs    []netip.Addr   // inner destinations, sorted; empty: nothing is
	Senders []netip.Prefix // permitted outer sources
	GUEPort uint16         // UDP, host byte order
	// Tunnelled gives decapsulated packets to the balancer's program for packets out of tunnels, not to the stack. Then VIPs and Senders
	// change often, and are many.
	Tunnelled bool
}

func (w Wanted) equal(o Wanted) bool {
	return w.alike(o) && slices.Equal(w.VIPs, o.VIPs) && slices.Equal(w.Senders, o.Senders)
}

// alike reports whether the programs differ in the contents of their maps at most.
func (w Wanted) alike(o Wanted) bool { return w.GUEPort == o.GUEPort && w.Tunnelled == o.Tunnelled }

// NewBeside decapsulates nothing yet. A predecessor's programs continue until the first Follow.
func NewBeside(plane DataPlane, log *slog.Logger) *Beside {
	return &Beside{plane: plane, log: log, programs: map[string]*besideProgram{}}
}

// Follow decapsulates the wanted tunnels on these interfaces, to which the balancer is attached, and on no
// others. anew loads all programs again: interfaces were attached to in between. A program is replaced in one
// step.
func (b *Beside) Follow(interfaces []string, wanted Wanted, anew bool) error {
	if len(wanted.VIPs) == 0 {
		for _, iface := range interfaces { // a predecessor's
			if b.programs[iface] == nil {
				if err := b.plane.StopDecapsulating(iface); err != nil {
					return err
				}
			}
		}
		interfaces = nil
	}
	for iface, p := range b.programs {
		if slices.Contains(interfaces, iface) {
			continue
		}
		if err := b.plane.StopDecapsulating(iface); err != nil {
			return err
		}
		p.objects.Close()
		delete(b.programs, iface)
	}
	for _, iface := range interfaces {
		if p := b.programs[iface]; p != nil && !anew && p.of.equal(wanted) {
			continue
		} else if p != nil && !anew && wanted.Tunnelled && p.of.alike(wanted) {
			if err := p.change(wanted); err != nil {
				return fmt.Errorf("decapsulate on interface %s: %w", iface, err)
			}
			continue
		}
		if err := b.load(iface, wanted); err != nil {
			return err
		}
		what := "decapsulating for this machine's own server"
		if wanted.Tunnelled {
			what = "decapsulating for services with endpoints on this node"
		}
		b.log.Info(what, "interface", iface, "vips", len(wanted.VIPs))
	}
	return nil
}

func (b *Beside) load(iface string, wanted Wanted) error {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return fmt.Errorf("decapsulate on interface %s: %w", iface, err)
	}
	p := &Program{Attachment: kernel.Attachment{Interface: iface}, ifindex: dev.Attrs().Index, held: map[netip.Addr]bool{}}
	err = b.plane.Decapsulate(iface, wanted.Tunnelled, func(shared map[string]*ebpf.Map, index uint32) (*ebpf.Program, error) {
		behind := &balancer{shared: shared, tunnelled: noIndex}
		if wanted.Tunnelled {
			behind.tunnelled = index
		}
		err := p.load(Options{VIPs: wanted.VIPs, Senders: wanted.Senders, GUEPort: wanted.GUEPort}, behind)
		return p.program, err
	})
	if err != nil {
		if p.program != nil {
			p.objects.Close()
		}
		return err
	}
	if old := b.programs[iface]; old != nil {
		old.objects.Close()
	}
	b.programs[iface] = &besideProgram{p, wanted}
	return nil
}

// change makes the program decapsulate other tunnels, without loading it again. At each moment it takes packets of tunnels that are wanted
// before and after the change. If change fails, the next Follow loads the program.
func (p *besideProgram) change(wanted Wanted) error {
	before := p.of
	p.of = Wanted{}
	for _, vip := range missingIn(before.VIPs, wanted.VIPs) {
		if err := p.put(decapMapShDcVips, toAddr(vip), "inner destination "+vip.String()); err != nil {
			return err
		}
	}
	for _, sender := range missingIn(before.Senders, wanted.Senders) {
		if err := p.put(decapMapShDcSenders, toSender(sender), "permitted sender "+sender.String()); err != nil {
			return err
		}
	}
	for _, sender := range missingIn(wanted.Senders, before.Senders) {
		if err := p.remove(decapMapShDcSenders, toSender(sender), "permitted sender "+sender.String()); err != nil {
			return err
		}
	}
	for _, vip := range missingIn(wanted.VIPs, before.VIPs) {
		if err := p.remove(decapMapShDcVips, toAddr(vip), "inner destination "+vip.String()); err != nil {
			return err
		}
	}
	p.of = wanted
	return nil
}

// missingIn returns the elements of all that a list lacks.
func missingIn[T comparable](list, all []T) (missing []T) {
	has := make(map[T]bool, len(list))
	for _, x := range list {
		has[x] = true
	}
	for _, x := range all {
		if !has[x] {
			missing = append(missing, x)
		}
	}
	return missing
}

// Refresh lets tunnels end at the present addresses of the interfaces. An interface that has gone has none.
func (b *Beside) Refresh() error {
	var errs []error
	for _, p := range b.programs {
		if err := p.Refresh(); !errors.As(err, new(netlink.LinkNotFoundError)) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Close closes the programs, which continue to run.
func (b *Beside) Close() {
	for iface, p := range b.programs {
		p.objects.Close()
		delete(b.programs, iface)
	}
}
