// Package tool has the common parts of commands that attach sensors and print their observations until
// Ctrl-C.
package tool

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/sensor"
)

// Folders are searched for a description of the kernel's types if the kernel has none and no file is named.
var Folders = []string{"/etc/shunt/btf", "/usr/lib/shunt/btf"}

// BTFFlag has a command take --btf.
func BTFFlag(c *cobra.Command, file *string) {
	c.Flags().StringVar(file, "btf", "", "file with the description of the kernel's types; default: the kernel's own, or found in "+Folders[0])
}

// FindTypes finds the description of the kernel's types.
func FindTypes(file string) (sensor.BTF, error) {
	types, err := sensor.FindBTF(file, Folders...)
	if err != nil {
		return types, fmt.Errorf("%w; name a file with --btf FILE", err)
	}
	return types, nil
}

// Context returns a context that ends when a tool is stopped.
func Context(parent context.Context) (context.Context, context.CancelFunc) {
	// `shunt diag io | head`: the summary is not wanted any more, and the sensors end with the process.
	signal.Ignore(syscall.SIGPIPE)
	return cli.UntilStopped(parent)
}

// Privileges adds the command with root's rights to an error about missing rights.
func Privileges(err error) error {
	if errors.Is(err, sensor.ErrPrivilege) {
		return fmt.Errorf("%w: run `%s`", err, cli.AsRoot())
	}
	return err
}

// PercentMax is above the percentage of all CPUs of any machine.
const PercentMax = 1_000_000
