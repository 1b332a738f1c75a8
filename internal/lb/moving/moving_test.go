package moving_test

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/moving"
)

// TestRemove finds and removes the table alone, and says whether there was one. A table that it may not see does not
// count as absent.
func TestRemove(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root: run the tests with sudo")
	}
	l, err := lab.New(fmt.Sprintf("mt%d", os.Getpid()))
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
		step := func(name string, want bool, is bool, err error) {
			t.Helper()
			if err != nil || is != want {
				t.Errorf("%s: %t, %v; want %t", name, is, err, want)
			}
		}
		is, err := moving.Left()
		step("there before", false, is, err)
		is, err = moving.Remove()
		step("removed where there is none", false, is, err)
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		own := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: moving.Table})
		conn.AddChain(&nftables.Chain{Table: own, Name: "nat", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest})
		conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "other"})
		conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: moving.Table})
		if err := conn.Flush(); err != nil {
			return err
		}
		is, err = moving.Left()
		step("there", true, is, err)
		forbidden(t)
		is, err = moving.Remove()
		step("removed", true, is, err)
		is, err = moving.Left()
		step("there after", false, is, err)
		tables, err := conn.ListTables()
		if err == nil && len(tables) != 2 {
			err = fmt.Errorf("%d tables are left of two others", len(tables))
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// forbidden looks for the table without CAP_NET_ADMIN.
func forbidden(t *testing.T) {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all [2]unix.CapUserData
	if err := unix.Capget(&header, &all[0]); err != nil {
		t.Fatal(err)
	}
	less := all
	less[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&header, &less[0]); err != nil {
		t.Fatal(err)
	}
	_, left := moving.Left()
	_, removed := moving.Remove()
	if err := unix.Capset(&header, &all[0]); err != nil {
		t.Fatal(err)
	}
	for attempt, err := range map[string]error{"Left": left, "Remove": removed} {
		if !errors.Is(err, os.ErrPermission) {
			t.Errorf("%s without CAP_NET_ADMIN: %v", attempt, err)
		}
	}
}
