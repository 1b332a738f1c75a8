// Package rival finds a kube-proxy that runs on this node by mistake, or the rules that a kube-proxy has left. Services
// work with both proxies on a node, and either of the two may balance a connection.
package rival

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables"

	"github.com/shunt-lb/shunt/kube/translate"
)

// name is the name of kube-proxy's program, and of its tables in mode nftables (pkg/proxy/nftables/proxier.go of Kubernetes).
const name = "kube-proxy"

// chain is a chain that kube-proxy makes in mode iptables, and kubelet does not (pkg/proxy/iptables/proxier.go).
const chain = "KUBE-SERVICES"

// device is the device on which kube-proxy in mode ipvs has the Services' addresses (pkg/proxy/ipvs/proxier.go).
const device = "kube-ipvs0"

// Found lists the traces of kube-proxy in this network namespace.
type Found struct {
	Processes []int    // by number, as this PID namespace has them
	Rules     []string // "nftables table ip kube-proxy"
}

// Look looks in the network namespace of the calling thread. It needs CAP_NET_ADMIN for rules, and sees the processes
// of its PID namespace. It does not find rules of the old iptables (legacy).
func Look() (f Found, err error) {
	if f.Processes, err = processes(); err != nil {
		return f, err
	}
	f.Rules, err = rules()
	if _, missing := net.InterfaceByName(device); missing == nil {
		f.Rules = append(f.Rules, "interface "+device)
	}
	return f, err
}

// Fault returns the fault to report; ok is false if nothing was found.
func (f Found) Fault(node string) (fault translate.Fault, ok bool) {
	fault = translate.Fault{Code: translate.KubeProxyFound, Object: "Node " + node}
	switch {
	case len(f.Processes) > 0:
		var numbers []string
		for _, p := range f.Processes {
			numbers = append(numbers, strconv.Itoa(p))
		}
		fault.Text = "kube-proxy runs beside shunt-kube (process " + strings.Join(numbers, ", ") + "), and either of the two may balance a connection"
		fault.Remedy = "delete its DaemonSet, then run `kube-proxy --cleanup` on the node"
	case len(f.Rules) > 0:
		fault.Text = "rules of a kube-proxy that no longer runs still send connections to its former pods (" + strings.Join(f.Rules, ", ") + ")"
		fault.Remedy = "run `kube-proxy --cleanup` on the node"
	default:
		return translate.Fault{}, false
	}
	return fault, true
}

// processes returns the processes called kube-proxy in the calling thread's network namespace.
func processes() (found []int, err error) {
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("look for kube-proxy: %w", err)
	}
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the process has ended meanwhile
		}
		// One binary may contain all components; its first argument then names the one that runs.
		words := bytes.SplitN(text, []byte{0}, 3)
		called := slices.ContainsFunc(words[:min(2, len(words))], func(w []byte) bool { return filepath.Base(string(w)) == name })
		if !called {
			continue
		}
		if where, err := os.Readlink(filepath.Join(filepath.Dir(file), "ns/net")); err != nil || where != own {
			continue
		}
		if number, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			found = append(found, number)
		}
	}
	slices.Sort(found)
	return found, nil
}

// families are nftables' words (nft(8), ADDRESS FAMILIES).
var families = map[nftables.TableFamily]string{nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6"}

func rules() (found []string, err error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("look for rules of kube-proxy: %w", err)
	}
	tables, err := conn.ListTables()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("look for rules of kube-proxy: %w", err)
	}
	for _, t := range tables {
		if family := families[t.Family]; family != "" && t.Name == name {
			found = append(found, "nftables table "+family+" "+name)
		}
	}
	chains, err := conn.ListChains()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("look for rules of kube-proxy: %w", err)
	}
	for _, c := range chains {
		if c.Name == chain && c.Table.Name == "nat" && families[c.Table.Family] != "" {
			found = append(found, "iptables chain "+chain+" ("+families[c.Table.Family]+")")
		}
	}
	slices.Sort(found)
	return found, nil
}
