package command

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/shunt-lb/shunt/internal/cli"
)

// commandVariable makes the test's binary be shunt.
const commandVariable = "SHUNT_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(commandVariable) != "" {
		os.Exit(Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// asStranger runs shunt without root's rights, and returns its output.
func asStranger(t *testing.T, arguments ...string) string {
	t.Helper()
	c := exec.Command("/proc/self/exe", arguments...) // whose folder only root may look into
	c.Args[0] = "shunt"
	c.Env = append(os.Environ(), commandVariable+"=1")
	if os.Getuid() == 0 {
		const nobody = 65534
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	text, err := c.CombinedOutput()
	if failed := (*exec.ExitError)(nil); !errors.As(err, &failed) || failed.ExitCode() != cli.ExitRefused {
		t.Errorf("shunt %s: %v, want exit code %d", strings.Join(arguments, " "), err, cli.ExitRefused)
	}
	return string(text)
}

// TestWithoutRoot: a command for root alone says which part of it needs root, and how to repeat it with all
// its arguments.
func TestWithoutRoot(t *testing.T) {
	const (
		silent = "shunt: no daemon answers at /nobody/answers (no such file); is `shunt run` running? --socket or SHUNT_SOCKET names another socket"
		maps   = silent + ". Root can read the maps without a daemon: `sudo shunt "
	)
	for arguments, want := range map[string]string{
		"run --config x.yaml":                                "shunt: `shunt run` loads programs into the kernel, which needs root: run `sudo shunt run --config x.yaml`",
		"uninstall --yes":                                    "shunt: `shunt uninstall` removes programs from the kernel and restores settings, which needs root: run `sudo shunt uninstall --yes`",
		"doctor --backend --vip 192.0.2.10":                  "shunt: `shunt doctor` looks at the programs in the kernel, which needs root: run `sudo shunt doctor --backend --vip 192.0.2.10`",
		"chain list --instance a":                            "shunt: `shunt chain list` reads maps of the kernel, which needs root: run `sudo shunt chain list --instance a`",
		"status --instance a --socket /nobody/answers":       maps + "status --instance a --socket /nobody/answers`",
		"backend list --instance a --socket /nobody/answers": maps + "backend list --instance a --socket /nobody/answers`",
		"backend drain 10.0.0.2 --socket /nobody/answers":    silent,
		"reload --socket /nobody/answers":                    silent,
		"detach --instance a --socket /nobody/answers":       silent + "; if no daemon runs instance \"a\" any more, remove the rest as root: `sudo shunt detach --instance a`",
	} {
		if text := asStranger(t, strings.Fields(arguments)...); text != want+"\n" {
			t.Errorf("shunt %s: it says\n%swant\n%s", arguments, text, want)
		}
	}
}
