package command

import (
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/decap"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/realserver"
	"github.com/shunt-lb/shunt/internal/value"
)

// decapStart reports the start of `shunt decap`; it is the first line of its -o json.
type decapStart struct {
	Event string    `json:"event"`
	Time  time.Time `json:"time"`
	PID   int       `json:"pid"`
	// Attached is null with --attach none.
	Attached *kernel.Attachment `json:"attached"`
	From     []netip.Prefix     `json:"from"`
	GUEPort  uint16             `json:"gue_port"`
	VIPs     []vipState         `json:"vips"`
	Settings []host.Setting     `json:"settings"` // changed
	Findings []finding          `json:"findings"` // as `shunt doctor --backend` tells them
}

type vipState struct {
	Address netip.Addr `json:"address"`
	Added   bool       `json:"added"` // to lo, by `shunt decap`
}

// decapPrinter prints the actions of `shunt decap`.
type decapPrinter struct {
	decapOptions
	log   *slog.Logger
	out   io.Writer
	shown decap.Numbers // as last printed
}

// Started prints the changes, and logs the remaining faults.
func (d *decapPrinter) Started(s decap.Started) error {
	start := decapStart{Event: "started", Time: time.Now().UTC(), PID: os.Getpid(), From: cli.NonNil(d.senders), GUEPort: d.guePort,
		Attached: s.Attachment, Settings: cli.NonNil(s.Settings)}
	for _, vip := range d.addresses {
		start.VIPs = append(start.VIPs, vipState{vip, slices.Contains(s.Added, vip)})
	}
	want := realserver.Want{Interface: d.iface, VIPs: d.addresses, GUEPort: d.guePort, Senders: d.senders, Forwarding: model.ForwardingDSRL2}
	if s.Attachment != nil { // it decapsulates both kinds of packets
		want.Forwarding = ""
	}
	var err error
	if start.Findings, err = examine(want); err != nil {
		d.log.Warn("could not run all checks", "error", err)
	}
	for _, f := range start.Findings {
		d.log.Warn(f.Text, "condition", f.Code, "subject", f.Subject, "remedy", f.Remedy)
	}
	if d.output == "json" {
		return cli.WriteLine(d.out, start)
	}
	return d.printText(start)
}

func (d *decapPrinter) printText(start decapStart) error {
	var text strings.Builder
	if a := start.Attached; a == nil {
		fmt.Fprintf(&text, "%s decapsulates nothing (--attach none).\n", d.iface)
	} else {
		kinds, senders := "IPIP", []string{}
		if d.guePort != 0 {
			kinds += fmt.Sprintf(", and GUE on UDP port %d,", d.guePort)
		}
		for _, p := range d.senders {
			senders = append(senders, p.String())
		}
		fmt.Fprintf(&text, "%s decapsulates %s from %s (XDP, %s).\n", a.Interface, kinds, strings.Join(senders, ", "), a.Mode)
		if a.Reason != "" {
			fmt.Fprintf(&text, "  not native: %s\n", a.Reason)
		}
	}
	for _, vip := range start.VIPs {
		state := "was here already"
		if vip.Added {
			state = "added to lo"
		}
		fmt.Fprintf(&text, "  %s  %s\n", vip.Address, state)
	}
	for _, s := range start.Settings {
		fmt.Fprintf(&text, "  %s\n", s)
	}
	fmt.Fprintln(&text, "Ctrl-C or SIGTERM undoes all of it.")
	_, err := io.WriteString(d.out, text.String())
	return err
}

// Counted prints the numbers of decapsulated and refused packets; when stopping only if they have changed since
// the last output.
func (d *decapPrinter) Counted(n decap.Numbers, stopping bool) error {
	if !stopping && maps.Equal(n.Kinds, d.shown.Kinds) && maps.Equal(n.Refused, d.shown.Refused) {
		return nil
	}
	d.shown = n
	if d.output == "json" {
		event := "counted"
		if stopping {
			event = "stopped"
		}
		return cli.WriteLine(d.out, map[string]any{"event": event, "time": time.Now().UTC(), "numbers": n})
	}
	text := fmt.Sprintf("%s  decapsulated %s", time.Now().Format(time.TimeOnly), value.Counted(int(n.TakenOff), "packet"))
	if len(n.Kinds) > 0 {
		text += " (" + listed(n.Kinds) + ")"
	}
	if len(n.Refused) > 0 {
		text += "; refused " + listed(n.Refused)
	}
	_, err := fmt.Fprintln(d.out, text)
	return err
}

// listed returns "decap_gue 3, decap_ipip 5".
func listed(numbers map[string]uint64) string {
	var parts []string
	for _, reason := range slices.Sorted(maps.Keys(numbers)) {
		parts = append(parts, fmt.Sprintf("%s %d", reason, numbers[reason]))
	}
	return strings.Join(parts, ", ")
}
