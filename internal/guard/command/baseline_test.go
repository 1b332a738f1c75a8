package command

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/cli"
)

// A user's commands: check, the dry run, fix, and rollback.
func TestGuardBaseline(t *testing.T) {
	root, journal := t.TempDir(), t.TempDir()
	file := filepath.Join(root, "etc/login.defs")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	const before = "UMASK 022\nLOGIN_RETRIES 5\n"
	if err := os.WriteFile(file, []byte(before), 0o644); err != nil {
		t.Fatal(err)
	}
	run := func(arguments ...string) (code int, out, errOut string) {
		var o, e bytes.Buffer
		code = Main(append([]string{"guard", "baseline"}, append(arguments, "--root", root)...), strings.NewReader(""), &o, &e)
		return code, o.String(), e.String()
	}
	is := func(want string) {
		t.Helper()
		if text, err := os.ReadFile(file); err != nil || string(text) != want {
			t.Errorf("%v: %q, want %q", err, text, want)
		}
	}
	code, out, _ := run("check")
	if code != cli.ExitRefused || !strings.Contains(out, "fails: login-umask: new files are not for others\n    found     UMASK 022 (/etc/login.defs:1)\n    expected  UMASK: a mask with 027\n    remedy    fix changes /etc/login.defs\n") {
		t.Errorf("exit %d: %s", code, out)
	}
	code, out, _ = run("check", "-o", "json")
	var answer struct {
		OK    bool
		Items []struct{ ID, Status, Remedy string }
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil || code != cli.ExitRefused || answer.OK || len(answer.Items) < 60 {
		t.Errorf("exit %d, %v: %s", code, err, out)
	}
	code, out, _ = run("fix", "login-umask", "--journal", journal)
	if code != cli.ExitOK || !strings.Contains(out, "-UMASK 022\n+UMASK 027\n") || !strings.Contains(out, "1 object would be changed to repair 1 item; 0 need a person. Nothing was changed: --apply makes the changes.") {
		t.Errorf("exit %d: %s", code, out)
	}
	is(before)
	code, out, _ = run("fix", "login-umask", "--journal", journal, "--apply", "-o", "json")
	if code != cli.ExitOK || !strings.Contains(out, `"fixed": true`) {
		t.Errorf("exit %d: %s", code, out)
	}
	is("UMASK 027\nLOGIN_RETRIES 5\n")
	if code, out, errOut := run("rollback", "--journal", journal); code != cli.ExitOK || !strings.Contains(out, "Journal 1: 1 object restored, 0 left.") {
		t.Errorf("exit %d: %s%s", code, out, errOut)
	}
	is(before)
	if code, out, _ := run("rollback", "--journal", journal); code != cli.ExitRefused || !strings.Contains(out, "has no journal of "+root) {
		t.Errorf("exit %d: %s", code, out)
	}
	for _, arguments := range [][]string{{"nosuch"}, {"check", "x"}, {"check", "-o", "xml"}, {"rollback", "x"}} {
		if code, _, _ := run(arguments...); code != cli.ExitUsage {
			t.Errorf("%v: exit %d", arguments, code)
		}
	}
	template := guardFile(t, "baseline: {change: [{id: no-cups, offf: true}]}\n")
	if code, _, errOut := run("check", "--template", template); code != cli.ExitRefused || !strings.Contains(errOut, `unknown key "offf"; did you mean "off"?`) {
		t.Errorf("exit %d: %s", code, errOut)
	}
}
