package command

import (
	"errors"
	"fmt"
	"net/netip"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lb/decap"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/spf13/cobra"
)

// decapOptions are set by the command line.
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

func newDecap(s cli.Streams) *cobra.Command {
	var o decapOptions
	c := &cobra.Command{
		Use:   "decap --interface NAME --vip ADDRESS... --from PREFIX...",
		Short: "Decapsulate IPIP and GUE on a backend, and add the VIPs without announcing them (needs root)",
		Long: `Make this machine a backend of a service with direct return, until SIGTERM or Ctrl-C. These
signals undo all changes of the command, and nothing else. If the process is killed instead,
decapsulation goes on, and the next start takes over.

  - The command decapsulates IPIP and GUE at XDP, only from permitted senders and only for
    the VIPs. All other packets pass untouched.
  - It adds the VIPs to lo, and sets arp_ignore and arp_announce so that this machine
    neither answers ARP requests for them nor announces them. It changes rp_filter from
    strict to loose.

For dsr-l2, which does not encapsulate packets, use --attach none, and leave --from out.`,
		Args: cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.complete(); err != nil {
				return err
			}
			if err := cli.RequireRoot("decap", cli.LoadsPrograms); err != nil {
				return err
			}
			log, err := cli.NewLog(s.Err, o.logFormat, o.verbose)
			if err != nil {
				return err
			}
			// `shunt decap | tee log`: Ctrl-C ends tee first, and shunt still has to clean up.
			signal.Ignore(syscall.SIGPIPE)
			ctx, cancel := cli.UntilStopped(c.Context())
			defer cancel()
			return decap.Run(ctx, decap.Config{
				Options: decap.Options{Interface: o.iface, Mode: model.Attach(o.attach), VIPs: o.addresses, Senders: o.senders,
					GUEPort: o.guePort, Log: log},
				Interval: o.interval,
			}, &decapPrinter{decapOptions: o, log: log, out: s.Out})
		},
	}
	f := c.Flags()
	f.StringVar(&o.iface, "interface", "", "interface where the balancer's packets arrive")
	f.StringSliceVar(&o.vips, "vip", nil, "address of a service; repeat the flag, or separate addresses with commas")
	f.StringSliceVar(&o.from, "from", nil, "permitted sender of tunnels: a balancer's address, or a prefix; repeat the flag, or separate with commas")
	f.Uint16Var(&o.guePort, "gue-port", model.DefaultGUEPort, "UDP port of GUE; 0: none")
	f.StringVar(&o.attach, "attach", "auto", "how to attach: auto, native, generic, or none (for dsr-l2); tc is not supported yet")
	f.DurationVar(&o.interval, "interval", 10*time.Second, "time between two reports of counters that have changed")
	cli.OutputFlag(c, &o.output)
	f.StringVar(&o.logFormat, "log-format", "text", "log format: text (key=value) or json")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "also log every change of an address")
	return c
}

// complete checks the flags and turns text into values.
func (o *decapOptions) complete() error {
	usage := func(format string, values ...any) error { return cli.UsageError{Err: fmt.Errorf(format, values...)} }
	if err := cli.RequireOutput(o.output); err != nil {
		return err
	}
	if o.iface == "" {
		return usage("--interface is missing: name the interface where the balancer's packets arrive")
	}
	var err error
	if o.addresses, err = parseVIPs(o.vips); err != nil {
		return err
	}
	switch model.Attach(o.attach) {
	case model.AttachAuto, model.AttachNative, model.AttachGeneric:
		if len(o.from) == 0 {
			return usage("--from is missing: name the balancers whose packets are decapsulated, or use --attach none for dsr-l2")
		}
	case decap.AttachNone:
		if len(o.from) > 0 {
			return usage("--from makes no sense with --attach none, which decapsulates nothing")
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
		return nil, cli.UsageError{Err: errors.New("--vip is missing: name the addresses of the services")}
	}
	for _, text := range texts {
		vip, err := netip.ParseAddr(text)
		if err != nil || vip.Zone() != "" || vip.Is4In6() || vip.IsUnspecified() || vip.IsLoopback() || vip.IsMulticast() {
			return nil, cli.UsageError{Err: fmt.Errorf("--vip %q is not the address of a service, like 192.0.2.10 or 2001:db8::10", text)}
		}
		if !slices.Contains(vips, vip) {
			vips = append(vips, vip)
		}
	}
	return vips, nil
}

// parsePrefix accepts an address as a prefix with all its bits.
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
