// Package churn has the kernel allocate memory for processes that begin and end.
package churn

import (
	"context"
	"os/exec"
	"testing"
)

// Begin has a shell make processes until end is called or the test ends. For a machine that does nothing else the kernel may allocate no
// memory for a second, and a tool leaves its own process out.
func Begin(t testing.TB) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	shell := exec.CommandContext(ctx, "sh", "-c", "while :; do (:) & (:) & (:) & wait; done")
	if err := shell.Start(); err != nil {
		cancel()
		t.Fatal(err)
	}
	return func() {
		cancel()
		_ = shell.Wait() // it is killed
	}
}
