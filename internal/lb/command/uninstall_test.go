package command

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/nftables"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/moving"
)

// The table of a `shunt-kube run --moving` is listed in its namespace. test/net removes it with the rest.
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
