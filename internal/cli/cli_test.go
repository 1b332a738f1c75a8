package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/settings"
)

// lampEntry is the section of a product that does nothing.
type lampEntry struct {
	config.Mark `json:"-"`
	Watts       config.Number `json:"watts,omitempty" doc:"How bright." min:"1" max:"9" default:"5" example:"3"`
}

// lamps are the products of the tests' daemon.
func lamps() []node.Product {
	return []node.Product{{
		Name:     "lamp",
		Part:     config.NewSection("lamp", "Does nothing.", "{watts: 3}", func(e *lampEntry, _ *config.Contents) any { return e.Watts.Value }),
		Describe: func(any) (string, []string) { return "1 lamp", []string{"It is bright."} },
		Left:     func() ([]string, error) { return []string{"attic"}, nil },
	}}
}

// run runs a command line of the floor's commands and others.
func run(args string, others ...*cobra.Command) (code int, out, errOut string) {
	var o, e bytes.Buffer
	code = Main(func(s Streams) *cobra.Command { return Root(s, lamps, Product{Commands: others}) }, strings.Fields(args), strings.NewReader(""), &o, &e)
	return code, o.String(), e.String()
}

// The exit code tells how a command ended, and standard error gives the reason unless the output has it.
func TestExitCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		code int
		says string
	}{
		{nil, ExitOK, ""},
		{errors.New("the disk is full"), ExitRefused, "shunt: the disk is full\n"},
		{ErrSilent, ExitRefused, ""},
		{fmt.Errorf("wait: %w", ErrStillBusy), ExitBusy, ""},
		{fmt.Errorf("plan: %w", errCuts), ExitCuts, ""},
		{fmt.Errorf("read: %w", UsageError{Err: errors.New("no number")}), ExitUsage, "shunt: read: no number\nRun `shunt --help`, or `shunt COMMAND --help`.\n"},
	} {
		code, out, errOut := run("end", &cobra.Command{Use: "end", RunE: func(*cobra.Command, []string) error { return c.err }})
		if code != c.code || out != "" || errOut != c.says {
			t.Errorf("%v: exit code %d, want %d, with %q and %q", c.err, code, c.code, out, errOut)
		}
	}
}

// A line that makes no sense is refused, with the wrong word, before anything is done.
func TestUsage(t *testing.T) {
	box := Group(&cobra.Command{Use: "box", Short: "Hold others"})
	box.AddCommand(&cobra.Command{Use: "open", RunE: func(*cobra.Command, []string) error { return nil }})
	one := &cobra.Command{Use: "one", Args: OneOf("box", "shunt backend list"), RunE: func(*cobra.Command, []string) error { return nil }}
	for args, want := range map[string]string{
		"dance":                       `there is no command "dance"`,
		"box dance":                   "there is no command \"dance\" of",
		"box open --loud":             "unknown flag: --loud",
		"one":                         "name one box; `shunt backend list` lists them",
		"one a b":                     "name one box",
		"check x.yaml":                `unexpected argument "x.yaml"; name a file with --config FILE`,
		"check -o yaml":               `--output is text or json, not "yaml"`,
		"check --unit -o json":        "--unit prints a drop-in, which has no JSON",
		"reload --instance ../x":      "a name is 1 to 32",
		"detach --instance ../x":      "a name is 1 to 32",
		"reload -o yaml":              `not "yaml"`,
		"run --on-exit dance --quiet": "unknown flag: --quiet",
	} {
		if code, out, errOut := run(args, box, one); code != ExitUsage || out != "" || !strings.Contains(errOut, want) {
			t.Errorf("shunt %s: exit code %d, want %d, and a message with %q:\n%s%s", args, code, ExitUsage, want, out, errOut)
		}
	}
	for _, args := range []string{"", "box", "--help"} {
		if code, out, errOut := run(args, box); code != ExitOK || errOut != "" || !strings.Contains(out, "Usage:") {
			t.Errorf("shunt %s: exit code %d, not help on standard output:\n%s%s", args, code, out, errOut)
		}
	}
	if code, out, _ := run("one a", one); code != ExitOK || out != "" {
		t.Errorf("shunt one a: exit code %d: %s", code, out)
	}
}

// write writes a configuration file.
func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestCheck(t *testing.T) {
	right, wrong := write(t, "lamp: {watts: 3}\n"), write(t, "lamp:\n  wats: 3\n")
	if code, out, errOut := run("check --config " + right); code != ExitOK || out != right+" is right: 1 lamp, 0 warnings.\nIt is bright.\n" || errOut != "" {
		t.Errorf("a file without faults: exit code %d\n%s%s", code, out, errOut)
	}
	if code, out, errOut := run("check --config " + wrong); code != ExitRefused || !strings.Contains(out, wrong+":2") || !strings.Contains(out, "watts") || errOut != "" {
		t.Errorf("a file with a fault: exit code %d\n%s%s", code, out, errOut)
	}
	if code, out, errOut := run("check --config /nowhere/shunt.yaml"); code != ExitRefused || out != "" || !strings.Contains(errOut, "/nowhere/shunt.yaml") {
		t.Errorf("no file: exit code %d\n%s%s", code, out, errOut)
	}
	var answer struct {
		OK     bool
		Faults []struct {
			Line       int
			Suggestion string
		}
	}
	code, out, _ := run("check -o json --config " + wrong)
	if err := json.Unmarshal([]byte(out), &answer); err != nil || code != ExitRefused || answer.OK || len(answer.Faults) != 1 || answer.Faults[0].Line != 2 {
		t.Errorf("as JSON: exit code %d, %v\n%s", code, err, out)
	}
	if code, out, _ = run("check -o json --config " + right); code != ExitOK || !strings.Contains(out, `"faults": []`) {
		t.Errorf("no faults as JSON: exit code %d\n%s", code, out)
	}
	// A drop-in must not have faults between its lines.
	if code, out, errOut := run("check --unit --config " + wrong); code != ExitRefused || out != "" || !strings.Contains(errOut, "watts") {
		t.Errorf("the drop-in of a file with a fault: exit code %d\n%s%s", code, out, errOut)
	}
	if code, out, _ := run("check --unit --config " + right); code != ExitOK || !strings.Contains(out, "[Service]") {
		t.Errorf("the drop-in: exit code %d\n%s", code, out)
	}
}

func TestSchema(t *testing.T) {
	code, out, _ := run("schema")
	var schema struct{ Properties map[string]any }
	if err := json.Unmarshal([]byte(out), &schema); err != nil || code != ExitOK || schema.Properties["lamp"] == nil || schema.Properties["api"] == nil {
		t.Errorf("exit code %d, %v, properties %v", code, err, schema.Properties)
	}
}

// house is a daemon that answers as its fields say.
type house struct {
	products []*shuntv1.Product
	reload   *shuntv1.ReloadResponse
}

func (h *house) Status(context.Context) (*shuntv1.GetStatusResponse, error) {
	return &shuntv1.GetStatusResponse{Instance: "default", Daemon: &shuntv1.Daemon{ConfigPath: "/etc/house.yaml", Products: h.products}}, nil
}
func (h *house) Conditions() []condition.Condition                       { return nil }
func (h *house) Reload(context.Context) (*shuntv1.ReloadResponse, error) { return h.reload, nil }
func (h *house) Plan(context.Context) (*shuntv1.ReloadResponse, error)   { return h.reload, nil }
func (h *house) Detach(context.Context, string, control.Author) error    { return nil }
func (h *house) Overrides() (control.Overrides, error)                   { return nil, control.ErrNoBalancer }

// serve has a daemon answer at a socket until the test ends.
func serve(t *testing.T, h *house) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "shunt.sock")
	s := &control.Server{Instance: "default", API: settings.API{Socket: socket}, Handler: h, Events: &control.Events{}, Log: slog.New(slog.DiscardHandler)}
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.Serve()
	t.Cleanup(func() { s.Stop(); s.Wait() })
	return socket
}

// Scripts see in the exit code whether a reload was refused, and whether a plan ends flows.
func TestReload(t *testing.T) {
	h := &house{}
	socket := serve(t, h)
	cut := &shuntv1.Cut{Backend: "10.0.0.2:80"}
	for _, c := range []struct {
		args   string
		reload *shuntv1.ReloadResponse
		code   int
		out    string
		errOut string
	}{
		{"reload", &shuntv1.ReloadResponse{Applied: true, Text: "+ lamp", Cuts: []*shuntv1.Cut{cut}}, ExitOK, "+ lamp\n", ""},
		{"reload", &shuntv1.ReloadResponse{Refused: "the file has faults"}, ExitRefused, "", "shunt: the reload was refused: the file has faults\n"},
		{"reload --plan", &shuntv1.ReloadResponse{Planned: true, Text: "+ lamp"}, ExitOK, "+ lamp\n", ""},
		{"reload --plan", &shuntv1.ReloadResponse{Planned: true, Text: "- lamp", Cuts: []*shuntv1.Cut{cut}}, ExitCuts, "- lamp\n", ""},
		{"reload --plan", &shuntv1.ReloadResponse{Refused: "no"}, ExitRefused, "", "shunt: the reload was refused: no\n"},
	} {
		h.reload = c.reload
		if code, out, errOut := run(c.args + " --socket " + socket); code != c.code || out != c.out || errOut != c.errOut {
			t.Errorf("%s, answer %v: exit code %d, want %d\n%s%s", c.args, c.reload, code, c.code, out, errOut)
		}
	}
	h.reload = &shuntv1.ReloadResponse{Refused: "no"}
	if code, out, errOut := run("reload -o json --socket " + socket); code != ExitRefused || !strings.Contains(out, `"refused": "no"`) || errOut != "" {
		t.Errorf("a refusal as JSON: exit code %d\n%s%s", code, out, errOut)
	}
}

// A command about a product gives the reason why the daemon has no status of it.
func TestProductReading(t *testing.T) {
	h := &house{}
	socket := serve(t, h)
	lamp := &ShownProduct{Name: "lamp", It: "the lamp", Show: "show the lamp", Page: "docs/lamp.md"}
	show := func(socket string) string {
		o := &ProductReading{Of: *lamp}
		c := &cobra.Command{Use: "lamp", RunE: func(c *cobra.Command, _ []string) error {
			_, err := o.Status(c.Context(), c)
			return err
		}}
		o.Flags(c)
		_, out, errOut := run("lamp --socket "+socket, c)
		return out + errOut
	}
	if got := show(socket); got != "shunt: show the lamp: the configuration /etc/house.yaml has no key lamp; docs/lamp.md says how to write one\n" {
		t.Errorf("without the product: %s", got)
	}
	h.products = []*shuntv1.Product{{Name: "lamp", Failed: "no bulb"}}
	if got := show(socket); got != "shunt: show the lamp: shunt could not start the lamp, and tries again: no bulb\n" {
		t.Errorf("with a product that failed: %s", got)
	}
	h.products = []*shuntv1.Product{{Name: "lamp", Does: "shining"}}
	if got := show(socket); got != "" {
		t.Errorf("with the product: %s", got)
	}
	if got := show("/nobody/answers"); !strings.Contains(got, "show the lamp: no daemon answers at /nobody/answers") {
		t.Errorf("without a daemon: %s", got)
	}
}

// The rest of an instance is removed only if there is one, and a wrong name is answered with the right ones.
func TestDetachNamesInstances(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("removing programs and maps needs root: run the tests with sudo")
	}
	const want = "shunt: detach instance \"cellar\": nothing of it is on this machine, where there are attic\n"
	if code, _, errOut := run("detach --unattended --instance cellar"); code != ExitRefused || errOut != want {
		t.Errorf("exit code %d: %s", code, errOut)
	}
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	table := NewTable(&out)
	fmt.Fprint(table, "NAME\tSTATE\nlong-name\tok\nx\t\n")
	table.Flush()
	fmt.Fprint(table, "a\tb\n")
	table.Flush()
	if want := "NAME       STATE\nlong-name  ok\nx\na  b\n"; out.String() != want {
		t.Errorf("the table is\n%q, want\n%q", out.String(), want)
	}
	for _, c := range []struct {
		most, shown, left int
		all               bool
	}{{2, 2, 1, false}, {3, 3, 0, false}, {2, 3, 0, true}} {
		if shown, left := First([]int{1, 2, 3}, c.most, c.all); len(shown) != c.shown || left != c.left {
			t.Errorf("of three at most %d (all: %t): %v and %d more", c.most, c.all, shown, left)
		}
	}
}

// An interrupted demo reports its faults, and not the interruption.
func TestWithoutCancel(t *testing.T) {
	fault := errors.New("the namespace is busy")
	for _, c := range []struct{ err, want error }{
		{nil, nil},
		{context.Canceled, nil},
		{fmt.Errorf("dial: %w", context.Canceled), nil},
		{fault, fault},
		{errors.Join(context.Canceled, fault), fault},
		{errors.Join(context.Canceled, fmt.Errorf("dial: %w", context.Canceled)), nil},
	} {
		if got := withoutCancel(c.err); !errors.Is(got, c.want) || errors.Is(got, context.Canceled) {
			t.Errorf("%v: %v is left, want %v", c.err, got, c.want)
		}
	}
}
