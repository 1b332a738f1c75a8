package command

import (
	"bytes"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/cli"
)

// Bad arguments are refused by name, with the exit code of usage errors, before root is required.
func TestDecapAndDoctorUsage(t *testing.T) {
	for args, want := range map[string]string{
		"decap":                  "--interface is missing",
		"decap --interface eth0": "--vip is missing",
		"decap --interface eth0 --vip 192.0.2.10":                                  "--from is missing",
		"decap --interface eth0 --vip 192.0.2.10/32 --from 10.0.0.1":               `--vip "192.0.2.10/32"`,
		"decap --interface eth0 --vip ::ffff:192.0.2.10 --from 10.0.0.1":           `--vip "::ffff:192.0.2.10"`,
		"decap --interface eth0 --vip 127.0.0.1 --from 10.0.0.1":                   `--vip "127.0.0.1"`,
		"decap --interface eth0 --vip 192.0.2.10 --from 10.0.0.1/24":               "did you mean 10.0.0.0/24 or 10.0.0.1/32?",
		"decap --interface eth0 --vip 192.0.2.10 --from balancer":                  `--from "balancer"`,
		"decap --interface eth0 --vip 192.0.2.10 --from ::ffff:10.0.0.1":           "neither an address nor a prefix",
		"decap --interface eth0 --vip 192.0.2.10 --from 10.0.0.1 --attach tc":      `not "tc"`,
		"decap --interface eth0 --vip 192.0.2.10 --from 10.0.0.1 --attach none":    "--from makes no sense",
		"decap --interface eth0 --vip 192.0.2.10 --from 10.0.0.1 --interval 10ms":  "--interval 10ms is too short",
		"decap --interface eth0 --vip 192.0.2.10 --from 10.0.0.1 -o yaml":          `not "yaml"`,
		"decap --interface eth0 --vip 192.0.2.10 --from 10.0.0.1 --gue-port 70000": "70000",
		"doctor":           "not supported yet; use --backend",
		"doctor --backend": "--vip is missing",
		"doctor --backend --vip 192.0.2.10 --forwarding nat": `not "nat"`,
		"doctor --backend --vip 192.0.2.10 -o yaml":          `not "yaml"`,
	} {
		var out, errOut bytes.Buffer
		if code := Main(strings.Fields(args), nil, &out, &errOut); code != cli.ExitUsage || !strings.Contains(errOut.String(), want) {
			t.Errorf("shunt %s: exit code %d, want %d, and a message with %q:\n%s", args, code, cli.ExitUsage, want, errOut.String())
		}
	}
}
