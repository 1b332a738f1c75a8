package command

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// From audited attempts comes a policy that can be used.
func TestGuardSuggest(t *testing.T) {
	program := filepath.Join(t.TempDir(), "app")
	if err := os.WriteFile(program, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	file := guardFile(t, "guard: {protect: [{name: data, paths: [/srv/data], deny: [write], mode: audit}]}\n")
	told := `{"operation":"write","path":"/srv/data/f","rules":["data"],"program":"` + program + `"}` + "\n"
	suggest := func(arguments ...string) (code int, out, errOut string) {
		var o, e bytes.Buffer
		code = Main(append([]string{"guard", "suggest", "--policy", file}, arguments...), strings.NewReader(told), &o, &e)
		return code, o.String(), e.String()
	}
	code, out, errOut := suggest()
	if code != cli.ExitOK || !strings.Contains(errOut, "data: 1 program did operations that the rule forbids\n  "+program+"  1 time, write, first of /srv/data/f\n    added to trust\n") {
		t.Errorf("exit %d: %s", code, errOut)
	}
	p, faults, err := policy.Load(guardFile(t, out))
	if err != nil || len(faults) > 0 || len(p.Rules) != 1 || p.Rules[0].Mode != policy.Audit || len(p.Rules[0].Trust.Programs) != 1 || p.Rules[0].Trust.Programs[0].Path != program {
		t.Errorf("%v %v: %s", err, faults, out)
	}
	events := filepath.Join(t.TempDir(), "events.json")
	if err := os.WriteFile(events, []byte(told), 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, _ = suggest(events, "-o", "json")
	var answer struct {
		Rules []struct{ Programs []struct{ Path string } }
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil || code != cli.ExitOK || len(answer.Rules) != 1 || answer.Rules[0].Programs[0].Path != program {
		t.Errorf("exit %d, %v: %s", code, err, out)
	}
	for _, arguments := range [][]string{{"a", "b"}, {"-o", "xml"}} {
		if code, _, _ := suggest(arguments...); code != cli.ExitUsage {
			t.Errorf("%v: exit %d", arguments, code)
		}
	}
	if code, _, errOut := suggest(program + "x"); code != cli.ExitRefused || !strings.Contains(errOut, "read the events: open") {
		t.Errorf("a missing file: exit %d: %s", code, errOut)
	}
	if code, _, errOut := suggest(file); code != cli.ExitRefused || !strings.Contains(errOut, "line 1 is no event of") {
		t.Errorf("a file that is no events: exit %d: %s", code, errOut)
	}
}
