package command

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/spf13/cobra"
)

// Bad arguments are refused by name, with the exit code of usage errors, before the daemon is asked.
func TestOverrideUsage(t *testing.T) {
	for args, want := range map[string]string{
		"override end":                     "there are list and clear",
		"override list now":                `unexpected argument "now"`,
		"override list -o yaml":            `not "yaml"`,
		"override clear":                   "or give --all",
		"override clear 10.0.0.2 mood":     "there are drain, weight and health",
		"override clear --all 10.0.0.2":    `there is no override "10.0.0.2"`,
		"backend restart 10.0.0.2":         "list, drain, undrain, weight and health",
		"backend weight 10.0.0.2":          "a backend and its weight",
		"backend weight 10.0.0.2 -- -1":    `weight "-1" is not a number`,
		"backend health 10.0.0.2":          "up, down or auto",
		"backend health 10.0.0.2 sideways": "up, down and auto",
		"backend list -o yaml":             `not "yaml"`,
		"backend list --instance ../x":     "a name is 1 to 32",
		"status --instance ../x":           "a name is 1 to 32",
	} {
		var out, errOut bytes.Buffer
		if code := Main(strings.Fields(args), nil, &out, &errOut); code != cli.ExitUsage || !strings.Contains(errOut.String(), want) {
			t.Errorf("shunt %s: exit code %d, want %d, and a message with %q:\n%s", args, code, cli.ExitUsage, want, errOut.String())
		}
	}
}

// A member of the group for reading may not open the first socket, and does not have to know this.
func TestAskReading(t *testing.T) {
	denied := fmt.Errorf("ask: %w", control.ErrDenied)
	for _, c := range []struct {
		answers []error
		want    error
	}{
		{[]error{nil}, nil},
		{[]error{control.ErrNoDaemon}, control.ErrNoDaemon},
		{[]error{denied, nil}, nil},
		{[]error{denied, control.ErrNoDaemon}, control.ErrNoDaemon},
		{[]error{denied, denied}, control.ErrDenied},
	} {
		asked := 0
		err := (&cli.Target{Socket: "/run/shunt/shunt.sock"}).Read(&cobra.Command{}, func(*control.Client) error {
			asked++
			return c.answers[asked-1]
		})
		if !errors.Is(err, c.want) || asked != len(c.answers) {
			t.Errorf("with answers %v: %v after %d questions, want %v", c.answers, err, asked, c.want)
		}
		if errors.Is(err, control.ErrDenied) && !strings.Contains(err.Error(), "read_group") {
			t.Errorf("denied, and not told about the group: %v", err)
		}
	}
}
