package rival_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/kube/rival"
)

// look looks on a host until the findings are as expected.
func look(t *testing.T, host *lab.Host, as func(rival.Found) bool) rival.Found {
	t.Helper()
	var found rival.Found
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		err := host.Run(func() (err error) {
			found, err = rival.Look()
			return err
		})
		if err == nil && as(found) {
			return found
		}
		if time.Now().After(end) {
			t.Fatalf("found %+v, %v", found, err)
		}
	}
}

func TestLook(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root: run the tests with sudo")
	}
	l, err := lab.New(fmt.Sprintf("r%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	node, err := l.AddHost("node")
	if err != nil {
		t.Fatal(err)
	}
	other, err := l.AddHost("other")
	if err != nil {
		t.Fatal(err)
	}
	none := func(f rival.Found) bool { return len(f.Processes)+len(f.Rules) == 0 }
	if fault, is := look(t, node, none).Fault("n1"); is {
		t.Errorf("nothing is there, and the fault is %v", fault)
	}

	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "kube-proxy")
	if err := os.Symlink(sleep, program); err != nil {
		t.Fatal(err)
	}
	proxy := node.Command(context.Background(), program, "600")
	if err := proxy.Start(); err != nil {
		t.Fatal(err)
	}
	found := look(t, node, func(f rival.Found) bool { return slices.Equal(f.Processes, []int{proxy.Process.Pid}) })
	if fault, is := found.Fault("n1"); !is || !strings.Contains(fault.Text, fmt.Sprintf("process %d)", proxy.Process.Pid)) {
		t.Errorf("the fault is %v", fault)
	}
	look(t, other, none) // another node's, on the same machine

	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(node.Run(func() error {
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv6, Name: "kube-proxy"})
		nat := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "nat"})
		conn.AddChain(&nftables.Chain{Table: nat, Name: "KUBE-SERVICES"})
		conn.AddChain(&nftables.Chain{Table: nat, Name: "KUBE-KUBELET-CANARY"}) // kubelet's
		return conn.Flush()
	}))
	must(proxy.Process.Kill())
	_ = proxy.Wait() // killed
	want := []string{"iptables chain KUBE-SERVICES (ip)", "nftables table ip6 kube-proxy"}
	found = look(t, node, func(f rival.Found) bool { return len(f.Processes) == 0 && slices.Equal(f.Rules, want) })
	if fault, is := found.Fault("n1"); !is || !strings.Contains(fault.Text, "iptables chain KUBE-SERVICES (ip), nftables table ip6 kube-proxy") {
		t.Errorf("the fault is %v", fault)
	}
}
