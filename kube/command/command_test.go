package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/kube/source"
)

// TestRunRefusesWhatMakesNoSense: flags are checked like the flags of `shunt run`, before any question to the
// cluster.
func TestRunRefusesWhatMakesNoSense(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: without it nothing else is looked at")
	}
	for arguments, says := range map[string]string{
		"--on-exit stay":                                  `--on-exit is detach, keep or drain, not "stay"`,
		"--instance ../x":                                 `--instance "../x": a name is`,
		"--drain-timeout 3s":                              "--drain-timeout is for --on-exit drain; with keep it has no effect",
		"--log-format xml":                                `--log-format is text or json, not "xml"`,
		"--on-exit drain --drain-timeout -1s":             "leaves no time to drain",
		"--direct-return geneve":                          `--direct-return is gue or ipip, not "geneve"`,
		"--direct-return gue --direct-return-tunnels a/b": "--direct-return gue needs --agents NAMESPACE/NAME: the Service of the agents",
		"--direct-return ipip --agents a/b":               "--direct-return ipip needs --direct-return-tunnels NAMESPACE/NAME: a ConfigMap",
	} {
		var out bytes.Buffer
		if code := Main(append([]string{"run", "--kubeconfig", "/nobody"}, strings.Fields(arguments)...), &out, &out); code != exitUsage || !strings.Contains(out.String(), says) {
			t.Errorf("%s: exit code %d and %q, want %d and %q", arguments, code, out.String(), exitUsage, says)
		}
	}
}

// TestClusterOptions: flags and the environment say which agents are followed, and for what.
func TestClusterOptions(t *testing.T) {
	for _, c := range []struct{ arguments, environment, want string }{
		{"", "", "agents= elect=false networks= direct= entries= moving=false outside=false"},
		{"--agents k/a --load-balancer-networks k/n", "", "agents= elect=false networks= direct= entries= moving=false outside=false"}, // nothing is announced
		{"--load-balancer-pool 192.0.2.0/24", "", "agents= elect=false networks= direct= entries= moving=false outside=false"},
		{"--load-balancer-pool 192.0.2.0/24 --agents k/a --load-balancer-networks k/n", "", "agents=k/a elect=true networks=k/n direct= entries= moving=false outside=false"},
		{"--load-balancer-pool 192.0.2.0/24 --agents k/a --load-balancer-networks k/n", "LOAD_BALANCER_ELECT=false", "agents= elect=false networks= direct= entries= moving=false outside=false"},
		{"--load-balancer-pool 192.0.2.0/24 --agents k/a --load-balancer-elect", "LOAD_BALANCER_ELECT=false", "agents=k/a elect=true networks= direct= entries= moving=false outside=false"},
		{"--load-balancer-pool 192.0.2.0/24 --load-balancer-announce none --agents k/a", "", "agents= elect=false networks= direct= entries= moving=false outside=false"},
		{"--direct-return gue --agents k/a --direct-return-tunnels k/t", "", "agents=k/a elect=false networks= direct=gue:6080 entries=k/t moving=false outside=false"},
		{"", "DIRECT_RETURN=ipip AGENTS=k/a DIRECT_RETURN_TUNNELS=k/t", "agents=k/a elect=false networks= direct=ipip entries=k/t moving=false outside=false"},
		{"--load-balancer-pool 192.0.2.0/24 --load-balancer-networks k/n --load-balancer-elect=false", "DIRECT_RETURN=ipip AGENTS=k/a DIRECT_RETURN_TUNNELS=k/t", "agents=k/a elect=false networks= direct=ipip entries=k/t moving=false outside=false"},
		{"", "MOVING=true EXTERNAL_IPS_INSIDE=false", "agents= elect=false networks= direct= entries= moving=true outside=true"},
		{"--moving --external-ips-inside=false", "", "agents= elect=false networks= direct= entries= moving=true outside=true"},
	} {
		t.Run(c.arguments+" "+c.environment, func(t *testing.T) {
			for _, entry := range strings.Fields(c.environment) {
				name, value, _ := strings.Cut(entry, "=")
				t.Setenv(name, value)
			}
			var from cluster
			command := &cobra.Command{}
			from.flags(command)
			if err := errors.Join(command.ParseFlags(strings.Fields(c.arguments)), from.check()); err != nil {
				t.Fatal(err)
			}
			o := from.options(nil, nil)
			if got := fmt.Sprintf("agents=%s elect=%t networks=%s direct=%s entries=%s moving=%t outside=%t", o.Agents, o.Elect, o.Networks, o.Direct.Tunnel, o.Direct.Entries, o.Moving, o.Outside); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

// TestExplainRefusesHalfASwitch: the commands that look know the switch by the environment of the agent's pod.
func TestExplainRefusesHalfASwitch(t *testing.T) {
	t.Setenv("DIRECT_RETURN", "gue")
	for _, command := range []string{"services", "check", "explain default/web"} {
		var out bytes.Buffer
		if code := Main(append(strings.Fields(command), "--kubeconfig", "/nobody"), &out, &out); code != exitUsage || !strings.Contains(out.String(), "--direct-return gue needs --agents") {
			t.Errorf("%s: exit code %d and %q", command, code, out.String())
		}
	}
}

// TestRefusesAFileWithoutTheBalancer: the agent's other products need no cluster, and without the balancer it would
// serve no Service.
func TestRefusesAFileWithoutTheBalancer(t *testing.T) {
	all := products(daemon.Options{Sources: []daemon.Source{{Name: source.Name}}})
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	for text, want := range map[string]string{
		"accelerate: {}": `there is no key "interfaces"`,
		"interfaces: [{name: eth0}]\naccelerate: {interfaces: \"cali*\"}": "",
		"interfaces: [{name: eth0}]":                                      "",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		read, err := node.Format(all).Read(path)
		if err != nil {
			t.Fatal(err)
		}
		var errs []string
		for _, f := range read.Faults.Sorted() {
			if f.Severity == config.SeverityError {
				errs = append(errs, f.Message)
			}
		}
		if strings.Join(errs, "; ") != want {
			t.Errorf("%q: the errors are %q, want %q", text, errs, want)
		}
	}
	if len(all) != 2 || all[1].Name != "accelerate" {
		t.Errorf("the products are %v", all)
	}
}

func TestAwaitsInterfaces(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	var out bytes.Buffer
	err := awaitInterfaces(ctx, slog.New(slog.NewTextHandler(&out, nil)), []string{"lo", "nobody0"})
	if err == nil || !strings.Contains(err.Error(), "nobody0") || strings.Contains(out.String(), "interface=lo") || strings.Count(out.String(), "interface=nobody0") != 1 {
		t.Errorf("it waits for lo, which exists, or does not say once that it waits for nobody0: %v\n%s", err, out.String())
	}
	if err := awaitInterfaces(t.Context(), nil, []string{"lo"}); err != nil {
		t.Error(err)
	}
}

// TestVariablesThatSayNothing: a variable that is neither true nor false is named, and not taken for one of them.
func TestVariablesThatSayNothing(t *testing.T) {
	t.Setenv("MOVING", "yes")
	var from cluster
	from.flags(&cobra.Command{})
	var usage usageError
	if err := from.check(); !errors.As(err, &usage) || !strings.Contains(err.Error(), `MOVING in the environment is true or false, not "yes"`) {
		t.Errorf("%v, want a usage error that names MOVING", err)
	}
}
