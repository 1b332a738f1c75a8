package command

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/daemon"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
)

// Pairs of sockets that a killed process left are listed, and removed.
func TestUninstallListsPairs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads programs and pins their maps")
	}
	instance := fmt.Sprintf("shunt-un-%d", os.Getpid())
	path, leave, err := lab.EnterCgroup(instance)
	if err != nil {
		t.Fatal(err)
	}
	defer leave() //nolint:errcheck // of the test
	if err := kernel.Mount(kernel.DefaultPinRoot, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(kernel.Directory(kernel.DefaultPinRoot, "_sockets"), instance)
	defer os.RemoveAll(folder) //nolint:errcheck // it is gone
	pairs, err := sockets.Open(sockets.Options{Cgroups: []string{path}, Limit: sockets.LimitDefault, Folder: filepath.Join(folder, "1")})
	if err != nil {
		t.Fatal(err)
	}
	if err := pairs.Close(); err != nil {
		t.Fatal(err)
	}
	listed := func() bool {
		all, err := left()
		if err != nil {
			t.Fatal(err)
		}
		for _, trace := range all {
			if trace.Kind == "pin" && strings.HasPrefix(trace.What, folder+": ") {
				return true
			}
		}
		return false
	}
	if !listed() {
		t.Errorf("%s is not listed", folder)
	}
	// Not all of the inventory: tests beside this one may have left pairs of their own.
	if err := daemon.Product().Remove(instance, slog.New(slog.DiscardHandler)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(folder); listed() || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", folder, err)
	}
}
