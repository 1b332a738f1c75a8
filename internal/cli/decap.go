package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/backend"
	"github.com/shunt-lb/shunt/internal/datapath"
	"github.com/shunt-lb/shunt/internal/model"
	"github.com/spf13/cobra"
	"github.com/vishvananda/netlink"
)

// defaultGUEPort is IANA's for GUE (Service Name and Transport Protocol Port Number Registry).
const defaultGUEPort = 6080

// attachNone is for dsr-l2, which encapsulates nothing.
const attachNone model.Attach = "none"

// decapOptions are what the command line says.
type decapOptions struct {
	iface, attach     string
	vips, from        []string
	guePort           uint16
	interval          time.Duration
	output, logFormat string
	verbose           bool

	addresses []netip.Addr
	senders   []netip.Prefix
}

func newDecap(s streams) *cobra.Command {
	var o decapOptions
	c := &cobra.Command{
		Use:   "decap --interface NAME --vip ADDRESS... --from PREFIX...",
		Short: "At a backend: take IPIP and GUE off, and have the VIPs without telling the network (needs root)",
		Long: `Makes this machine a backend of a service with direct return, until SIGTERM or Ctrl-C,
which undo all of it and nothing else. If the process is killed instead, packets go on
being taken off, and the next start takes over.

  - takes IPIP and GUE off at XDP, only from permitted senders and only for the VIPs;
    what is not that passes untouched
  - adds the VIPs to lo, and sets arp_ignore and arp_announce so that ARP does not know
    of them; sets rp_filter from strict to loose

For dsr-l2, which encapsulates nothing, say --attach none, and no --from.`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.complete(); err != nil {
				return err
			}
			if err := requireRoot("decap", loadsPrograms); err != nil {
				return err
			}
			log, err := newLog(s.err, o.logFormat, o.verbose)
			if err != nil {
				return err
			}
			// `shunt decap | tee log`: Ctrl-C ends tee first, and shunt still has to clean up.
			signal.Ignore(syscall.SIGPIPE)
			ctx, cancel := untilStopped(c.Context())
			defer cancel()
			return runDecap(ctx, o, log, s.out)
		},
	}
	f := c.Flags()
	f.StringVar(&o.iface, "interface", "", "where the balancer's packets arrive")
	f.StringSliceVar(&o.vips, "vip", nil, "address of a service; repeat it, or separate with commas")
	f.StringSliceVar(&o.from, "from", nil, "permitted sender of tunnels: the balancers' addresses, or a prefix; repeat it, or separate with commas")
	f.Uint16Var(&o.guePort, "gue-port", defaultGUEPort, "UDP port of GUE; 0: none")
	f.StringVar(&o.attach, "attach", "auto", "auto, native, generic, or none (for dsr-l2); tc is not supported yet")
	f.DurationVar(&o.interval, "interval", 10*time.Second, "how often numbers that have changed are printed")
	outputFlag(c, &o.output)
	f.StringVar(&o.logFormat, "log-format", "text", "text (key=value) or json")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "log every change of an address, too")
	return c
}

// complete checks the flags and turns text into values.
func (o *decapOptions) complete() error {
	usage := func(format string, values ...any) error { return usageError{fmt.Errorf(format, values...)} }
	if err := requireOutput(o.output); err != nil {
		return err
	}
	if o.iface == "" {
		return usage("--interface is missing: name the one where the balancer's packets arrive")
	}
	var err error
	if o.addresses, err = parseVIPs(o.vips); err != nil {
		return err
	}
	switch model.Attach(o.attach) {
	case model.AttachAuto, model.AttachNative, model.AttachGeneric:
		if len(o.from) == 0 {
			return usage("--from is missing: name the balancers whose tunnels are taken off, or say --attach none for dsr-l2")
		}
	case attachNone:
		if len(o.from) > 0 {
			return usage("--from makes no sense with --attach none, which takes nothing off")
		}
	default:
		return usage("--attach is auto, native, generic or none, not %q", o.attach)
	}
	for _, text := range o.from {
		p, err := parsePrefix(text)
		if err != nil {
			return usage("--from %q: %w", text, err)
		}
		o.senders = append(o.senders, p)
	}
	if o.interval < time.Second {
		return usage("--interval %s is too short: at least 1s", o.interval)
	}
	return nil
}

func parseVIPs(texts []string) (vips []netip.Addr, err error) {
	if len(texts) == 0 {
		return nil, usageError{errors.New("--vip is missing: name the addresses of the services")}
	}
	for _, text := range texts {
		vip, err := netip.ParseAddr(text)
		if err != nil || vip.Zone() != "" || vip.Is4In6() || vip.IsUnspecified() || vip.IsLoopback() || vip.IsMulticast() {
			return nil, usageError{fmt.Errorf("--vip %q is not the address of a service, like 192.0.2.10 or 2001:db8::10", text)}
		}
		if !slices.Contains(vips, vip) {
			vips = append(vips, vip)
		}
	}
	return vips, nil
}

// parsePrefix takes an address for a prefix with all its bits.
func parsePrefix(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		text = netip.PrefixFrom(a.WithZone(""), a.BitLen()).String()
	}
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil || p.Addr().Is4In6():
		return p, errors.New("it is neither an address nor a prefix, like 10.0.0.1 or 10.0.0.0/24")
	case p != p.Masked():
		return p, fmt.Errorf("the address has bits beyond the prefix length; did you mean %s or %s/%d?", p.Masked(), p.Addr(), p.Addr().BitLen())
	}
	return p, nil
}

// decapper is a running `shunt decap`.
type decapper struct {
	decapOptions
	log    *slog.Logger
	out    io.Writer
	space  string
	record *backend.Record
	state  backend.State
	decap  *datapath.Decap // nil with --attach none
	shown  decapNumbers    // as last printed
}

// runDecap does it, waits, and undoes it.
func runDecap(ctx context.Context, o decapOptions, log *slog.Logger, out io.Writer) (err error) {
	d := &decapper{decapOptions: o, log: log, out: out}
	if d.space, err = backend.Space(); err != nil {
		return err
	}
	if d.record, err = backend.OpenRecord(backend.RunDirectory, d.space); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.record.Close()) }()
	changes, err := d.watch(ctx)
	if err != nil {
		return err
	}
	// What is refused before anything is changed leaves a predecessor's work as it is.
	if _, err := net.InterfaceByName(o.iface); err != nil {
		return fmt.Errorf("take encapsulation off on interface %q: it does not exist; `ip link` lists those that do", o.iface)
	}
	if d.state, err = d.record.Read(); err != nil {
		return err
	}
	if err := d.start(); err != nil {
		return errors.Join(err, d.undo())
	}
	if err := d.printStart(); err != nil {
		d.log.Warn("what was done could not be printed", "error", err)
	}
	d.loop(ctx, changes)
	if err := d.printNumbers("stopped"); err != nil {
		d.log.Warn("the last numbers could not be printed", "error", err)
	}
	if err := d.undo(); err != nil {
		return fmt.Errorf("not everything was undone, and %s says what is left; start and stop again: %w", d.record.Path(), err)
	}
	d.log.Info("stopped: everything is as it was before", "interface", d.iface)
	return nil
}

// watch tells of changed addresses. It begins before the addresses are first read.
func (d *decapper) watch(ctx context.Context) (<-chan netlink.AddrUpdate, error) {
	changes := make(chan netlink.AddrUpdate, 64)
	err := netlink.AddrSubscribeWithOptions(changes, ctx.Done(), netlink.AddrSubscribeOptions{
		ErrorCallback: func(err error) {
			if ctx.Err() == nil {
				d.log.Warn("changes of addresses are not noticed at once any more", "error", err)
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("subscribe to changes of addresses: %w", err)
	}
	return changes, nil
}

// start makes the machine a backend. What it has done when it fails is undone by undo.
func (d *decapper) start() error {
	if !d.state.IsZero() {
		d.log.Info("taking over from an earlier start that did not end by itself")
	}
	var err error
	if d.state, err = backend.Prepare(d.iface, d.addresses, d.state, d.record.Write); err != nil {
		return err
	}
	if d.attach == string(attachNone) {
		return datapath.RemoveDecap("", d.space)
	}
	d.decap, err = datapath.AttachDecap(datapath.DecapOptions{
		Name: d.space, Interface: d.iface, Mode: model.Attach(d.attach), VIPs: d.addresses, Senders: d.senders,
		GUEPort: d.guePort, Log: d.log,
	})
	return err
}

// undo takes back what was done, by this process and by those before it that were killed.
// The program goes first, so that no packet meets a machine that is half a backend.
func (d *decapper) undo() error {
	var errs []error
	if d.decap != nil {
		errs = append(errs, d.decap.Detach())
	} else {
		errs = append(errs, datapath.RemoveDecap("", d.space))
	}
	left, err := d.state.Restore()
	return errors.Join(append(errs, err, d.record.Write(left))...)
}

// loop keeps the program's addresses right and prints numbers, until ctx ends.
func (d *decapper) loop(ctx context.Context, changes <-chan netlink.AddrUpdate) {
	tick := time.NewTicker(d.interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case change, open := <-changes:
			if !open {
				changes = nil
			}
			d.log.Debug("an address has changed", "address", change.LinkAddress.String(), "added", change.NewAddr)
		case <-tick.C:
			if err := d.printNumbers("counted"); err != nil {
				d.log.Warn("the numbers could not be printed", "error", err)
			}
		}
		if d.decap == nil {
			continue
		}
		if err := d.decap.Refresh(); err != nil {
			d.log.Warn("tunnels end at the addresses that the interface had before", "error", err)
		}
	}
}

// decapNumbers are packets since the start.
type decapNumbers struct {
	TakenOff uint64            `json:"taken_off"`
	Kinds    map[string]uint64 `json:"kinds"`   // taken off, by reason
	Refused  map[string]uint64 `json:"refused"` // by reason
}

// takenOff are the reasons of packets that were taken off.
var takenOff = []string{"decap_ipip", "decap_gue"}

// ordinary are the reasons of packets that have nothing to do with tunnels.
var ordinary = []string{"not_ip", "vlan", "decap_no_tunnel", "decap_ecn"}

func (d *decapper) numbers() (decapNumbers, error) {
	n := decapNumbers{Kinds: map[string]uint64{}, Refused: map[string]uint64{}}
	if d.decap == nil {
		return n, nil
	}
	counters, err := d.decap.Counters()
	for reason, c := range counters {
		switch {
		case slices.Contains(takenOff, reason):
			n.Kinds[reason] = c.Packets
			n.TakenOff += c.Packets
		case !slices.Contains(ordinary, reason):
			n.Refused[reason] = c.Packets
		}
	}
	return n, err
}

// printNumbers prints what was taken off and refused; only when stopping, if that is as it
// was printed last.
func (d *decapper) printNumbers(event string) error {
	n, err := d.numbers()
	if err != nil {
		return err
	}
	if event != "stopped" && maps.Equal(n.Kinds, d.shown.Kinds) && maps.Equal(n.Refused, d.shown.Refused) {
		return nil
	}
	d.shown = n
	if d.output == "json" {
		return writeLine(d.out, map[string]any{"event": event, "time": time.Now().UTC(), "numbers": n})
	}
	text := fmt.Sprintf("%s  took off %s", time.Now().Format(time.TimeOnly), counted(int(n.TakenOff), "packet"))
	if len(n.Kinds) > 0 {
		text += " (" + listed(n.Kinds) + ")"
	}
	if len(n.Refused) > 0 {
		text += "; refused " + listed(n.Refused)
	}
	_, err = fmt.Fprintln(d.out, text)
	return err
}

// listed is "decap_gue 3, decap_ipip 5".
func listed(numbers map[string]uint64) string {
	var parts []string
	for _, reason := range slices.Sorted(maps.Keys(numbers)) {
		parts = append(parts, fmt.Sprintf("%s %d", reason, numbers[reason]))
	}
	return strings.Join(parts, ", ")
}
