package command

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/decoy"
	"github.com/shunt-lb/shunt/internal/value"
)

// decoyFolders are the folders with the notes about decoys.
type decoyFolders struct{ journal, run string }

func newGuardDecoys(s cli.Streams) *cobra.Command {
	c := cli.Group(&cobra.Command{
		Use:   "decoys COMMAND",
		Short: "List, restore and remove decoys, and decide about programs that were stopped at them (needs root)",
	})
	in := decoyFolders{decoy.Directory, agent.RunDirectory}
	c.AddCommand(newDecoysList(s, in), newDecoysRestore(s, in), newDecoysRemove(s, in),
		newDecoysDecide(s, in, "release", "Resume a program that was stopped at decoys; it is not stopped again (needs root)", false),
		newDecoysDecide(s, in, "kill", "End a program that was stopped at decoys (needs root)", true))
	return c
}

func newDecoysList(s cli.Streams, in decoyFolders) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "list",
		Short: "List decoys with their state, and programs that are stopped (needs root)",
		Args:  cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := errors.Join(cli.RequireOutput(output), cli.RequireRoot("guard decoys list", "reads the journal of decoys")); err != nil {
				return err
			}
			all, err := decoy.List(in.journal)
			if err != nil {
				return err
			}
			trees, err := decoy.Stopped(in.run)
			if err != nil {
				return err
			}
			if output == "json" {
				return cli.WriteJSON(s.Out, map[string]any{"decoys": all, "stopped": cli.NonNil(trees)})
			}
			printDecoys(s.Out, all, trees, time.Now())
			return nil
		},
	}
	cli.OutputFlag(c, &output)
	return c
}

func printDecoys(w io.Writer, all []decoy.State, trees []decoy.Tree, now time.Time) {
	counts, bytes := map[string]int{}, int64(0)
	folders := map[string]bool{}
	for _, d := range all {
		counts[d.State]++
		bytes += d.Size
		folders[filepath.Dir(d.Path)] = true
		why := ""
		if d.Why != "" {
			why = ": " + d.Why
		}
		fmt.Fprintf(w, "%-7s  %s%s\n", d.State, event.Printable(d.Path), why)
	}
	fmt.Fprintf(w, "%s in %s: %d stand, %d changed, %d gone. Their sizes are %d KiB, most of which are holes.\n", value.Counted(len(all), "decoy"), value.Counted(len(folders), "folder"),
		counts[decoy.Stands], counts[decoy.Changed], counts[decoy.Gone], bytes>>10)
	for _, t := range trees {
		state, then := "stopped", fmt.Sprintf("`shunt guard decoys release %[1]d` lets it go on, `shunt guard decoys kill %[1]d` ends it", t.Processes[0].PID)
		if t.Released {
			state, then = "let go on", "it is not stopped again"
		}
		fmt.Fprintf(w, "%s %s ago: %s, process %d, and the processes that belong to it: %s\n  why: %s\n", state, now.Sub(t.At).Round(time.Second), event.Printable(t.Processes[0].Program), t.Processes[0].PID, then, event.Printable(t.Why))
	}
}

// printDecoyStatus prints the state of decoys, and the programs that touched them.
func printDecoyStatus(w io.Writer, d decoy.Status, now time.Time) {
	fmt.Fprintf(w, "    %s stand in %s; %d changed, %d gone\n", value.Counted(d.Stand, "decoy"), value.Counted(len(d.Folders), "folder"), d.Changed, d.Gone)
	for _, folder := range slices.Sorted(maps.Keys(d.Folders)) {
		fmt.Fprintf(w, "      %s: %d\n", event.Printable(folder), d.Folders[folder])
	}
	for _, left := range d.Unwatched {
		fmt.Fprintf(w, "    warning: not watched: %s\n", event.Printable(left))
	}
	for _, t := range d.Touched {
		program := "a process that had ended"
		if t.Program != "" {
			program = fmt.Sprintf("%s %d", event.Printable(t.Program), t.PID)
		}
		fmt.Fprintf(w, "    %s ago: %s was %s by %s\n", now.Sub(t.At).Round(time.Second), event.Printable(t.Path), event.Printable(t.How), program)
	}
}

// sayDecoys prints the number of decoys at the start.
func sayDecoys(w io.Writer, status agent.Status) {
	for _, f := range status.Features {
		if f.Decoys != nil {
			fmt.Fprintf(w, "Watching %s in %s.\n", value.Counted(f.Decoys.Stand, "decoy"), value.Counted(len(f.Decoys.Folders), "folder"))
		}
	}
}

// changeDecoys changes decoys with the journal held, and prints the results.
func changeDecoys(s cli.Streams, in decoyFolders, output, did string, change func(*decoy.Store) (decoy.Report, error)) error {
	store, err := decoy.Open(in.journal)
	if err != nil {
		return err
	}
	r, err := change(store)
	if err = errors.Join(err, store.Close()); err != nil {
		return err
	}
	if output == "json" {
		err = cli.WriteJSON(s.Out, map[string]any{did: cli.NonNil(r.Done), "left": cli.NonNil(r.Left)})
	} else {
		for _, left := range r.Left {
			fmt.Fprintf(s.Out, "left %s\n", event.Printable(left))
		}
		fmt.Fprintf(s.Out, "%s %s, %d left.\n", value.Counted(len(r.Done), "decoy"), did, len(r.Left))
	}
	if err == nil && len(r.Left) > 0 {
		return cli.ErrSilent
	}
	return err
}

func newDecoysRestore(s cli.Streams, in decoyFolders) *cobra.Command {
	var output string
	var replace bool
	c := &cobra.Command{
		Use:   "restore",
		Short: "Make missing decoys again, with their times (needs root)",
		Long: `Make missing decoys again, with their names and times. A changed file stays as it is, and is named; with
--replace the decoy replaces it. A ` + "`shunt guard run`" + ` that runs watches the new decoys at once. The
command exits with 1 if a changed file is left.`,
		Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := errors.Join(cli.RequireOutput(output), cli.RequireRoot("guard decoys restore", "makes files of other users")); err != nil {
				return err
			}
			return changeDecoys(s, in, output, "restored", func(store *decoy.Store) (decoy.Report, error) { return store.Restore(replace) })
		},
	}
	c.Flags().BoolVar(&replace, "replace", false, "also replace changed files by decoys; the changed contents are lost")
	cli.OutputFlag(c, &output)
	return c
}

func newDecoysRemove(s cli.Streams, in decoyFolders) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "remove",
		Short: "Remove all decoys that are unchanged (needs root)",
		Long: `Remove all decoys that are as shunt made them. A file that was changed, or replaced by another file, stays and
is named; the exit status is then 1. The command refuses while a ` + "`shunt guard run`" + ` watches decoys: remove
decoys from its policy and send it SIGHUP, or end it.`,
		Args: cli.NoArguments,
		RunE: func(*cobra.Command, []string) error {
			if err := errors.Join(cli.RequireOutput(output), cli.RequireRoot("guard decoys remove", "deletes files of other users")); err != nil {
				return err
			}
			if err := noWaiting(in); err != nil {
				return err
			}
			return changeDecoys(s, in, output, "removed", func(store *decoy.Store) (decoy.Report, error) { return store.Remove(nil) })
		},
	}
	cli.OutputFlag(c, &output)
	return c
}

// noWaiting refuses while an agent waits at decoys.
func noWaiting(in decoyFolders) error {
	running, err := agent.Ask(in.run)
	if err != nil || running == nil {
		return err
	}
	for _, f := range running.Features {
		if f.Name == agent.DecoysName && f.On {
			return fmt.Errorf("process %d, a `shunt guard run`, watches decoys: remove decoys from its policy and send it SIGHUP, which removes them, or end it first", running.PID)
		}
	}
	return nil
}

func newDecoysDecide(s cli.Streams, in decoyFolders, word, short string, kill bool) *cobra.Command {
	return &cobra.Command{
		Use:     word + " PID",
		Short:   short,
		Example: "  sudo shunt guard decoys " + word + " 4711",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return cli.UsageError{Err: errors.New("name one process by its number; the alert and `shunt guard decoys list` show it")}
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			pid, err := strconv.Atoi(args[0])
			if err != nil || pid < 1 {
				return cli.UsageError{Err: fmt.Errorf("%q is not the number of a process", args[0])}
			}
			if err := cli.RequireRoot("guard decoys "+word, "sends signals to processes of others"); err != nil {
				return err
			}
			tree, err := decoy.Decide(in.run, pid, kill)
			if err != nil {
				return err
			}
			done := "goes on, and is not stopped again"
			if kill {
				done = "is ended"
			}
			fmt.Fprintf(s.Out, "%s, process %d, %s, with all processes that belong to it.\n", event.Printable(tree.Processes[0].Program), tree.Processes[0].PID, done)
			return nil
		},
	}
}

// leftDecoys lists the decoys for uninstall.
func leftDecoys(in decoyFolders) ([]cli.Trace, error) {
	trees, err := decoy.Stopped(in.run)
	if err != nil {
		return nil, err
	}
	for _, t := range trees {
		if !t.Released {
			return nil, fmt.Errorf("process %[1]d is stopped at decoys, and would stay stopped: decide with `shunt guard decoys release %[1]d` or `shunt guard decoys kill %[1]d`", t.Processes[0].PID)
		}
	}
	all, err := decoy.List(in.journal)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	if err := noWaiting(in); err != nil {
		return nil, err
	}
	return []cli.Trace{{Kind: "decoy", What: value.Counted(len(all), "file") + " that shunt made; changed ones stay", Remove: func() error {
		store, err := decoy.Open(in.journal)
		if err != nil {
			return err
		}
		r, err := store.Remove(nil)
		if left := len(store.Decoys()); left > 0 && err == nil {
			err = fmt.Errorf("%s could not be removed: %s", value.Counted(left, "decoy"), value.Few(r.Left))
		}
		return errors.Join(err, store.Close())
	}}}, nil
}
