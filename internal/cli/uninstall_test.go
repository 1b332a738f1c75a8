package cli

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/nftables"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/moving"
	pod "github.com/shunt-lb/shunt/internal/pod/daemon"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
)

// What a killed process has left of pairs of sockets is listed, and taken away.
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
	left, err := sockets.Open(sockets.Options{Cgroups: []string{path}, Limit: sockets.LimitDefault, Folder: filepath.Join(folder, "1")})
	if err != nil {
		t.Fatal(err)
	}
	if err := left.Close(); err != nil {
		t.Fatal(err)
	}
	listed := func() bool {
		inventory := &daemon.Inventory{}
		if err := addPairs(inventory); err != nil {
			t.Fatal(err)
		}
		for _, trace := range inventory.Traces {
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
	if err := pod.Product().Remove(instance, slog.New(slog.DiscardHandler)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(folder); listed() || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", folder, err)
	}
}

// The table of a `shunt-kube run --moving` is listed where it is. test/net has it taken away with the rest.
func TestUninstallFindsMoving(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root: run the tests with sudo")
	}
	l, err := lab.New(fmt.Sprintf("um%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	node, err := l.AddHost("node")
	if err != nil {
		t.Fatal(err)
	}
	if err := node.Run(func() error {
		inventory := &daemon.Inventory{}
		if err := addMoving(inventory); err != nil || len(inventory.Traces) != 0 {
			return fmt.Errorf("without the table: %v, %w", inventory.Traces, err)
		}
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: moving.Table})
		if err := conn.Flush(); err != nil {
			return err
		}
		if err := addMoving(inventory); err != nil || len(inventory.Traces) != 1 || !strings.Contains(inventory.Traces[0].What, "inet shunt-moving") {
			return fmt.Errorf("with the table: %v, %w", inventory.Traces, err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}
