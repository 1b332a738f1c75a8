// Package churn makes the kernel allocate memory for processes that begin and end.
package churn

import (
	"context"
	"os/exec"
	"testing"
)

// Begin starts a shell that makes processes until end is called or the test ends. On an idle machine the kernel may
// allocate no memory for a second, and a tool does not count its own process.
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
		_ = shell.Wait() // it is killed, so the error says nothing
	}
}
