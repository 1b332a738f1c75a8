package command

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/decoy"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// A user's commands: list, restore, remove, and the ones that are refused.
func TestGuardDecoys(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, as the commands do")
	}
	root := t.TempDir()
	in := decoyFolders{filepath.Join(root, "lib"), filepath.Join(root, "run")}
	data := filepath.Join(root, "data")
	if err := os.Mkdir(data, 0o755); err != nil {
		t.Fatal(err)
	}
	store, err := decoy.Open(in.journal)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Make([]string{data}); err != nil {
		t.Fatal(err)
	}
	gone, changed := store.Decoys()[0].Path, store.Decoys()[2].Path
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	run := func(command func(cli.Streams, decoyFolders) *cobra.Command, arguments ...string) (out string, err error) {
		var o bytes.Buffer
		c := command(cli.Streams{Out: &o, Err: &o}, in)
		c.SetArgs(append([]string{}, arguments...)) // of nil, cobra takes the arguments of this process
		c.SilenceUsage, c.SilenceErrors = true, true
		err = c.Execute()
		return o.String(), err
	}
	if out, err := run(newDecoysList); err != nil || !strings.Contains(out, "stands   "+gone+"\n") || !strings.Contains(out, "8 decoys in 1 folder: 8 stand, 0 changed, 0 gone. Their sizes are 20") {
		t.Errorf("%v: %s", err, out)
	}
	if err := os.Remove(gone); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(changed, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := run(newDecoysList); err != nil || !strings.Contains(out, "gone     "+gone+"\n") || !strings.Contains(out, "changed  "+changed+"\n") {
		t.Errorf("%v: %s", err, out)
	}
	out, err := run(newDecoysList, "-o", "json")
	var listed struct {
		Decoys  []decoy.State
		Stopped []decoy.Tree
	}
	if bad := json.Unmarshal([]byte(out), &listed); err != nil || bad != nil || len(listed.Decoys) != 8 || listed.Decoys[0].State != decoy.Gone || listed.Stopped == nil {
		t.Errorf("%v, %v: %s", err, bad, out)
	}
	if out, err := run(newDecoysRestore); err != cli.ErrSilent || !strings.Contains(out, "left "+changed+": it was changed") || !strings.Contains(out, "1 decoy restored, 1 left.") {
		t.Errorf("%v: %s", err, out)
	}
	for _, word := range []string{"release", "kill"} {
		decide := func(s cli.Streams, in decoyFolders) *cobra.Command {
			return newDecoysDecide(s, in, word, "", word == "kill")
		}
		for argument, want := range map[string]string{"1": "it was not stopped at a decoy", "x": "is not the number of a process", "": "is not the number"} {
			if _, err := run(decide, argument); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s %q: %v", word, argument, err)
			}
		}
	}
	a, err := agent.Start(policy.Policy{Decoys: []policy.Decoys{{Folders: []string{data}, Action: rule.Stop}}}, agent.Options{
		Root: t.TempDir(), Folder: in.run, Decoys: in.journal, Log: slog.New(slog.DiscardHandler), Say: t.Output(), Tell: func(agent.Line) error { return nil }})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := run(newDecoysRemove); err == nil || !strings.Contains(err.Error(), "watches decoys") {
		t.Error(err)
	}
	if out, err := run(newDecoysRestore, "--replace"); err != nil || !strings.Contains(out, "1 decoy restored, 0 left.") {
		t.Errorf("%v: %s", err, out)
	}
	if _, err := leftDecoys(in); err == nil || !strings.Contains(err.Error(), "watches decoys") {
		t.Error(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if left, err := leftDecoys(in); err != nil || len(left) != 1 || left[0].What != "8 files that shunt made; changed ones stay" {
		t.Errorf("%v: %+v", err, left)
	}
	if out, err := run(newDecoysRemove); err != nil || out != "8 decoys removed, 0 left.\n" {
		t.Errorf("%v: %s", err, out)
	}
	if left, err := leftDecoys(in); err != nil || len(left) != 0 {
		t.Errorf("%v: %+v", err, left)
	}
	if left, err := os.ReadDir(data); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
}

func TestGuardCheckNamesDecoys(t *testing.T) {
	file := guardFile(t, "guard: {decoys: [{folders: [/srv/data], action: kill, trust: {programs: [/usr/bin/restic]}}]}\n")
	code, out, _ := guardMain("check", file)
	if code != cli.ExitOK || !strings.Contains(out, " has decoys.") || !strings.Contains(out, "  kill programs that encrypt, by decoys in /srv/data and 2 deep in them; trusting /usr/bin/restic\n") {
		t.Errorf("exit %d: %s", code, out)
	}
}
