package command

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/decap"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/realserver"
	"github.com/shunt-lb/shunt/internal/value"
)

// finding is a condition in `shunt doctor`.
type finding struct {
	Code     string             `json:"code"`
	Severity condition.Severity `json:"severity"`
	Subject  string             `json:"subject"`
	Text     string             `json:"text"`
	Meaning  string             `json:"meaning"` // why it matters
	Remedy   string             `json:"remedy"`
}

func newDoctor(s cli.Streams) *cobra.Command {
	var atBackend bool
	var vips []string
	var iface, forwarding, output string
	var guePort uint16
	c := &cobra.Command{
		Use:   "doctor --backend --vip ADDRESS...",
		Short: "Find what is wrong on a backend where direct return fails, and the command that fixes it",
		Long: `With --backend, examine this machine as a backend of services with direct return. The command
changes nothing. It exits with 0 if nothing is wrong, and with 1 otherwise.

The command sees only this machine, not the network. It cannot know whether the balancer reaches
this machine, and whether clients receive the machine's answers.`,
		Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if !atBackend {
				return cli.UsageError{Err: errors.New("a balancer cannot be examined: that is not supported yet; use --backend, on a backend")}
			}
			if err := cli.RequireOutput(output); err != nil {
				return err
			}
			f := model.Forwarding(forwarding)
			if f != "" && !f.Direct() {
				return cli.UsageError{Err: fmt.Errorf("--forwarding is dsr-l2, dsr-ipip or dsr-gue, not %q; other modes need nothing on a backend", forwarding)}
			}
			addresses, err := parseVIPs(vips)
			if err != nil {
				return err
			}
			if err := cli.RequireRoot("doctor", "looks at the programs in the kernel"); err != nil {
				return err
			}
			return examineBackend(s, realserver.Want{Interface: iface, VIPs: addresses, Forwarding: f, GUEPort: guePort}, output)
		},
	}
	c.Flags().BoolVar(&atBackend, "backend", false, "examine this machine as a backend with direct return")
	c.Flags().StringSliceVar(&vips, "vip", nil, "address of a service; repeat the flag, or separate addresses with commas")
	c.Flags().StringVar(&iface, "interface", "", "interface where the balancer's packets arrive (default: the interface of the default route)")
	c.Flags().StringVar(&forwarding, "forwarding", "", "forwarding of the service: dsr-l2, dsr-ipip or dsr-gue; without it, encapsulation is examined only if this machine decapsulates")
	c.Flags().Uint16Var(&guePort, "gue-port", model.DefaultGUEPort, "UDP port of GUE")
	cli.OutputFlag(c, &output)
	return c
}

// examine examines this machine. It knows sh_decap, which the package realserver cannot see.
func examine(want realserver.Want) ([]finding, error) {
	facts, err := realserver.Look()
	if err != nil {
		return nil, err
	}
	if want.Interface == "" {
		return nil, cli.UsageError{Err: errors.New("there is no default route that shows the interface: name the interface with --interface")}
	}
	for _, l := range facts.Links {
		if l.Name != want.Interface {
			continue
		}
		here, err := decap.On(l.Name)
		if err == nil && !here {
			here, err = attach.Decapsulates(l.Name)
		}
		if err != nil {
			return nil, err
		}
		if here {
			facts.Decap = append(facts.Decap, l.Name)
		}
	}
	findings := []finding{}
	for _, c := range realserver.Examine(facts, want) {
		d, _ := realserver.Lookup(c.Code)
		findings = append(findings, finding{c.Code, c.Severity, c.Subject, c.Text, d.Meaning, c.Remedy})
	}
	return findings, nil
}

func examineBackend(s cli.Streams, want realserver.Want, output string) error {
	if want.Interface == "" {
		facts, err := realserver.Look()
		if err != nil {
			return err
		}
		want.Interface = facts.DefaultInterface()
	}
	findings, err := examine(want)
	if err != nil {
		return err
	}
	wrong := 0
	for _, f := range findings {
		if f.Severity != condition.Info {
			wrong++
		}
	}
	if output == "json" {
		err = cli.WriteJSON(s.Out, map[string]any{"ok": wrong == 0, "interface": want.Interface, "findings": findings})
	} else {
		err = printFindings(s.Out, want, findings, wrong)
	}
	if err == nil && wrong > 0 {
		err = cli.ErrSilent
	}
	return err
}

func printFindings(w io.Writer, want realserver.Want, findings []finding, wrong int) error {
	for _, f := range findings {
		if _, err := fmt.Fprintf(w, "%s: %s\n  why   %s\n  fix   %s\n\n", f.Severity, f.Text, f.Meaning, f.Remedy); err != nil {
			return err
		}
	}
	if want.Forwarding == "" {
		if _, err := fmt.Fprintln(w, "Without --forwarding, shunt does not know whether this machine has to decapsulate packets."); err != nil {
			return err
		}
	}
	verdict := fmt.Sprintf("Nothing is wrong on %s: this machine is fit for direct return.", want.Interface)
	if wrong > 0 {
		verdict = fmt.Sprintf("%s on %s.", value.Counted(wrong, "fault"), want.Interface)
	}
	_, err := fmt.Fprintln(w, verdict)
	return err
}
