package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/start"
	"github.com/shunt-lb/shunt/internal/value"
)

func newRun(s Streams, products func() []node.Product) *cobra.Command {
	var flags start.Flags
	c := &cobra.Command{
		Use:   "run",
		Short: "Balance traffic: load the data plane and keep it correct (needs root)",
		Long: `Load the data plane, attach it to the configured interfaces, and keep it correct until SIGTERM or
Ctrl-C. If the process is killed instead, the kernel goes on balancing packets, and the next
start takes over. SIGHUP makes the daemon apply the file again.

--on-exit says what SIGTERM does:
  detach  the daemon removes everything; connections through shunt end (the default)
  keep    the kernel goes on balancing packets, without health checks, and the next start takes
          over with all connections; ` + "`shunt detach`" + ` ends it
  drain   no service takes new flows; the daemon detaches when the existing flows have ended,
          or after --drain-timeout
Ctrl-C (SIGINT) always detaches. A second Ctrl-C exits at once, as if the process were killed.`,
		Args: NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := RequireRoot("run", LoadsPrograms); err != nil {
				return err
			}
			if err := flags.Check(c, s.Err); err != nil {
				return UsageError{Err: err}
			}
			flags.Products, flags.Version = products(), Version()
			return flags.Run(flags.Obey(c.Context(), func() { os.Exit(ExitInterrupted) }), s.Err)
		},
	}
	flags.Add(c, node.ExitDetach)
	return c
}

func newCheck(s Streams, products func() []node.Product) *cobra.Command {
	var path, output string
	var host, unit bool
	c := &cobra.Command{
		Use:   "check",
		Short: "Check a configuration file: report all faults, each with its line and a suggestion; no root, no daemon",
		Long: `Check a configuration file, and report all faults, each with its line and a suggestion. The command needs
neither root nor a daemon. With --unit, standard output is a drop-in for the systemd unit of the package,
which gives the rights that the products and settings of this file need, and no others:

  shunt check --unit > needs.conf
  sudo install -D -m 644 needs.conf /etc/systemd/system/shunt.service.d/needs.conf
  sudo systemctl daemon-reload && sudo systemctl restart shunt`,
		Args: NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := RequireOutput(output); err != nil {
				return err
			}
			if unit && output == "json" {
				return UsageError{Err: errors.New("--unit prints a drop-in, which has no JSON: leave out -o json, or --unit")}
			}
			all := products()
			read, err := node.Format(all).Read(path)
			if err != nil {
				return err
			}
			node.CheckHost(all, read, node.HostCheck{Command: true, Strict: host})
			faults := read.Faults.Sorted()
			bad := config.HasErrors(faults)
			if unit {
				return printUnit(s, path, all, read, faults)
			}
			if output == "json" {
				if err := WriteJSON(s.Out, map[string]any{"ok": !bad, "faults": NonNil(faults), "unchecked": NonNil(unchecked(read))}); err != nil {
					return err
				}
			} else {
				if err := config.Render(s.Out, faults); err != nil {
					return err
				}
				if !bad {
					printVerdict(s, path, all, read, len(faults))
				}
			}
			if bad {
				return ErrSilent
			}
			return nil
		},
	}
	c.Flags().StringVar(&path, "config", start.DefaultConfig, "configuration: a file, or a directory of *.yaml")
	c.Flags().BoolVar(&host, "host", false, "report a setting that this machine does not support as an error, not as a warning")
	c.Flags().BoolVar(&unit, "unit", false, "print a drop-in for the systemd unit with the rights that this file needs, and no others")
	OutputFlag(c, &output)
	return c
}

// printUnit prints the drop-in for a file. Faults go to the other output, so that they do not become part of
// it.
func printUnit(s Streams, path string, all []node.Product, read *config.Contents, faults []config.Fault) error {
	if err := config.Render(s.Err, faults); err != nil {
		return err
	}
	if config.HasErrors(faults) {
		return ErrSilent
	}
	fmt.Fprintf(s.Out, "# Permissions that shunt needs for %s, printed by `shunt check --unit`. Print it again when the file names\n# other products or settings: the kernel refuses everything that the drop-in does not permit.\n", path)
	return node.WriteDropIn(s.Out, node.NeedsOf(all, read))
}

// unchecked names the services whose backends are not checked, if the settings have checks.
func unchecked(read *config.Contents) (all []string) {
	for _, settings := range read.Settings {
		if one, knows := settings.(interface{ Unchecked() []string }); knows {
			all = append(all, one.Unchecked()...)
		}
	}
	return all
}

func printVerdict(s Streams, path string, all []node.Product, read *config.Contents, warnings int) {
	var counts, lines []string
	for _, p := range all {
		if settings, named := read.Settings[p.Name]; named {
			count, more := p.Describe(settings)
			counts, lines = append(counts, count), append(lines, more...)
		}
	}
	fmt.Fprintf(s.Out, "%s is right: %s, %s.\n", path, strings.Join(counts, ", "), value.Counted(warnings, "warning"))
	for _, line := range lines {
		fmt.Fprintln(s.Out, line)
	}
}

func newSchema(s Streams, products func() []node.Product) *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of the configuration file, for editors",
		Args:  NoArguments,
		RunE: func(*cobra.Command, []string) error {
			_, err := s.Out.Write(node.Schema(products()))
			return err
		},
	}
}

func newReload(s Streams) *cobra.Command {
	var t Target
	var output string
	var plan bool
	c := &cobra.Command{
		Use:   "reload",
		Short: "Make the daemon apply its file now, wait, and print the difference",
		Long: `Make the daemon apply its file now, wait, and print the difference. With --plan the daemon says
what a reload would change and which flows would end, and changes nothing: the exit code is 4 if
flows would end, 0 if none would, and 1 if the reload would be refused.`,
		Args: NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := errors.Join(RequireOutput(output), t.Check()); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
			defer cancel()
			ask := t.Client(c).Reload
			if plan {
				ask = t.Client(c).Plan
			}
			result, err := ask(ctx)
			if err != nil {
				return err
			}
			if output == "json" {
				err = WriteMessage(s.Out, result)
			} else {
				err = printReload(s, result)
			}
			switch {
			case err != nil:
			case !result.Applied && !result.Planned:
				err = ErrSilent
			case plan && len(result.Cuts) > 0:
				err = errCuts
			}
			return err
		},
	}
	t.Flags(c)
	c.Flags().BoolVar(&plan, "plan", false, "only print what would change and which flows would end")
	OutputFlag(c, &output)
	return c
}

func printReload(s Streams, result *shuntv1.ReloadResponse) error {
	if err := config.Render(s.Out, faultsOf(result)); err != nil {
		return err
	}
	if !result.Applied && !result.Planned {
		_, err := fmt.Fprintf(s.Err, "shunt: the reload was refused: %s\n", result.Refused)
		return err
	}
	_, err := fmt.Fprintln(s.Out, result.Text)
	return err
}

// faultsOf returns a reload's faults as the file's own.
func faultsOf(result *shuntv1.ReloadResponse) (all []config.Fault) {
	for _, f := range result.Faults {
		all = append(all, config.Fault{File: f.File, Line: int(f.Line), Column: int(f.Column), Severity: config.Severity(f.Severity),
			Path: f.Path, Text: f.Text, Message: f.Message, Suggestion: f.Suggestion})
	}
	return all
}

func newDetach(s Streams, products func() []node.Product) *cobra.Command {
	var instance, socket string
	var unattended bool
	c := &cobra.Command{
		Use:   "detach",
		Short: "Stop forwarding: end the daemon, or remove the data plane of a killed daemon",
		Long: `Ask the daemon to stop and to remove its data plane, whatever its --on-exit says, and wait until
it has. Connections through shunt end. If no daemon runs, the command removes the data plane
of a daemon that was killed or was stopped with --on-exit keep. This needs root. With
--unattended the command refuses while a daemon runs, and names its process.`,
		Args: NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := RequireInstance(instance); err != nil {
				return err
			}
			if unattended {
				if err := RequireRoot("detach --unattended", "removes programs and maps from the kernel"); err != nil {
					return err
				}
				return detachRest(s, products(), instance, "and --unattended never ends a daemon: end it")
			}
			ctx, cancel := context.WithTimeout(c.Context(), detachTimeout)
			defer cancel()
			answer, asked := control.NewClient(socket).Detach(ctx, instance)
			switch {
			case asked == nil:
				_, err := fmt.Fprintf(s.Out, "Instance %q forwards nothing now, and nothing of it is left. Its daemon, process %d, has ended.\n", instance, answer.Pid)
				return err
			case !errors.Is(asked, control.ErrNoDaemon) && !errors.Is(asked, control.ErrOtherInstance):
				return asked
			case os.Geteuid() != 0:
				return fmt.Errorf("%w; if no daemon runs instance %q any more, remove the rest as root: `sudo %s`", asked, instance, node.DetachCommand(instance))
			}
			return detachRest(s, products(), instance, fmt.Sprintf("which does not answer at %s: name its socket with --socket, or end it", socket))
		},
	}
	start.TargetFlags(c, &instance, &socket)
	c.Flags().BoolVar(&unattended, "unattended", false, "refuse while a daemon runs the instance")
	return c
}

// detachRest removes the remains of a daemon. running is the advice for one that runs.
func detachRest(s Streams, products []node.Product, instance, running string) error {
	log, err := NewLog(s.Out, "text", false)
	if err != nil {
		return err
	}
	known, err := node.Left(products)
	if err != nil {
		return err
	}
	if !slices.Contains(known, instance) {
		others := "and nothing of any other instance"
		if len(known) > 0 {
			others = "where there are " + value.Few(known)
		}
		return fmt.Errorf("detach instance %q: nothing of it is on this machine, %s", instance, others)
	}
	err = node.Detach(instance, products, log)
	if held := (*node.RunsError)(nil); errors.As(err, &held) {
		return fmt.Errorf("instance %q is run by process %s, %s with `kill -INT %s`", instance, held.Process, running, held.Process)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(s.Out, "Instance %q forwards nothing now, and nothing of it is left.\n", instance)
	return err
}

// detachTimeout is more than the time to remove a large data plane on a busy machine.
const detachTimeout = 2 * time.Minute

// LoadsPrograms describes the commands that attach programs.
const LoadsPrograms = "loads programs into the kernel"

// RequireRoot refuses early and plainly a command that the kernel would refuse late. does is the action that
// needs root.
func RequireRoot(command, does string) error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("`shunt %s` %s, which needs root: run `%s`", command, does, AsRoot())
	}
	return nil
}

// RequireInstance refuses names that no instance can have.
func RequireInstance(instance string) error {
	if err := node.CheckInstance(instance); err != nil {
		return UsageError{Err: err}
	}
	return nil
}

// NonNil is an empty list for none, which JSON shows as [].
func NonNil[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// WriteJSON prints a value as JSON, indented.
func WriteJSON(w interface{ Write([]byte) (int, error) }, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// WriteMessage prints a message of the API as the API does, but indented.
func WriteMessage(w io.Writer, m proto.Message) error {
	text, err := control.JSON(m)
	if err != nil {
		return err
	}
	return WriteJSON(w, json.RawMessage(text))
}

// WriteMessages prints a list of messages.
func WriteMessages[M proto.Message](w io.Writer, all []M) error {
	list := make([]json.RawMessage, len(all))
	for i, m := range all {
		text, err := control.JSON(m)
		if err != nil {
			return err
		}
		list[i] = text
	}
	return WriteJSON(w, list)
}

// WriteLine writes JSON on one line, for output of several objects.
func WriteLine(w io.Writer, v any) error {
	line, err := json.Marshal(v)
	if err == nil {
		_, err = w.Write(append(line, '\n'))
	}
	return err
}
