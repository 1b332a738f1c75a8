package doctor

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/hook"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func bits(n uint64) *uint64 { return &n }

// fit has no findings.
func fit() Facts {
	return Facts{
		Interface: "eth0", Driver: "ice", MTU: 1500, Queues: 4, CPUs: 8, XDP: bits(xdpBasic | xdpZeroCopy), Isolated: "4-7",
		Hash: map[string]uint64{"udp4": 0xf0, "udp6": 0xf0}, Features: map[string]bool{"rx-lro": false}, Governors: map[string]int{"performance": 8},
		Interrupts: []Interrupt{{40, "ice-eth0-TxRx-0", "0", 0}, {41, "ice-eth0-TxRx-1", "1", 1}},
		Node:       0, Nodes: map[int][]int{0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}},
		Workers: []Worker{{"feed", 0, 4, true, false}, {"feed", 1, 5, true, false}, {"polled", 1, 1, true, true}},
	}
}

func TestExamine(t *testing.T) {
	if got := Examine(fit()); len(got) != 0 {
		t.Errorf("nothing is wrong, and found is %+v", got)
	}
	for _, c := range []struct {
		name   string
		change func(*Facts)
		code   string
		fault  bool
		remedy string
	}{
		{"a large MTU", func(f *Facts) { f.MTU = 9000 }, "mtu", true, "ip link set dev eth0 mtu 3818"},
		{"LRO", func(f *Facts) { f.Features["rx-lro"] = true }, "merging", true, "ethtool -K eth0 lro off"},
		{"GRO in hardware", func(f *Facts) { f.Features["rx-gro-hw"] = true }, "merging", true, "ethtool -K eth0 rx-gro-hw off"},
		{"another program", func(f *Facts) { f.Program = "17" }, "occupied", true, "bpftool prog show id 17"},
		{"shunt's own program", func(f *Facts) { f.Program, f.Own = "17", "the program of shunt's UDP path" }, "occupied", false, "shunt udp list"},
		{"no XDP", func(f *Facts) { f.XDP = bits(0) }, "generic", false, "mode: generic"},
		{"no zero-copy", func(f *Facts) { f.XDP = bits(xdpBasic) }, "copy", false, "mode: copy"},
		{"too many queues", func(f *Facts) { f.Queues, f.CPUs = 128, 128 }, "queues", true, "ethtool -L eth0 combined 64"},
		{"more queues than CPUs", func(f *Facts) { f.Queues = 16 }, "queues", false, "ethtool -L eth0 combined 8"},
		{"a hash without ports", func(f *Facts) { f.Hash["udp6"] = 0x30 }, "hash", false, "ethtool -N eth0 rx-flow-hash udp6 sdfn"},
		{"one CPU for all interrupts", func(f *Facts) { f.Interrupts[1].Affinity, f.Workers = "0", nil }, "irq", false, "echo 1 > /proc/irq/41/smp_affinity_list"},
		{"a slow governor", func(f *Facts) { f.Governors["powersave"] = 2 }, "governor", false, "cpupower frequency-set -g performance"},
		{"a far CPU", func(f *Facts) { f.Workers[0].CPU, f.Interrupts[0].Affinity = 6, "0-3" }, "numa", false, "cpu: [0] # in the entry feed of udp, for this queue; the CPUs of node 0 are 0,1,4,5"},
		{"an interrupt on the program's CPU", func(f *Facts) { f.Interrupts[0].Affinity = "4" }, "shared", false, "echo 0 > /proc/irq/40/smp_affinity_list"},
		{"an interrupt on another node", func(f *Facts) { f.Interrupts[0].Affinity = "3" }, "apart", false, "echo 0 > /proc/irq/40/smp_affinity_list"},
		{"polling on another CPU", func(f *Facts) { f.Workers, f.Interrupts[1].Affinity = f.Workers[2:], "4" }, "polled", false, "echo 1 > /proc/irq/41/smp_affinity_list"},
		{"no pinned thread", func(f *Facts) { f.Workers[1].Pinned = false }, "pinned", false, "taskset -c 5 PROGRAM"},
		{"no isolated CPU", func(f *Facts) { f.Isolated = "" }, "isolated", false, "isolcpus=7"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := fit()
			c.change(&f)
			got := Examine(f)
			if len(got) != 1 || got[0].Code != c.code || got[0].Fault != c.fault || !strings.HasPrefix(got[0].Remedy, c.remedy) && !strings.Contains(got[0].Remedy, c.remedy) || got[0].Text == "" || got[0].Why == "" {
				t.Errorf("found %+v; want %s: %s", got, c.code, c.remedy)
			}
		})
	}
	// An unknown fact is no finding; one queue needs no hash, and interrupts with many CPUs each do not share one.
	f := fit()
	f.XDP, f.Hash, f.Queues, f.Interrupts = nil, nil, 1, []Interrupt{{40, "a", "0-7", 0}, {41, "b", "0-7", 1}}
	if got := Examine(f); len(got) != 0 {
		t.Errorf("found %+v", got)
	}
}

// The limits are those of packages hook and xsk.
func TestLimits(t *testing.T) {
	if queuesMax != hook.MaxQueues {
		t.Errorf("%d queues", hook.MaxQueues)
	}
	if _, err := xsk.FrameSize(mtuMax); err != nil {
		t.Error(err)
	}
	if _, err := xsk.FrameSize(mtuMax + 1); err == nil {
		t.Errorf("an MTU of %d is possible", mtuMax+1)
	}
}

// tree makes files.
func tree(t *testing.T, files map[string]string) (root string) {
	t.Helper()
	root = t.TempDir()
	for path, text := range files {
		must(t, os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755))
		must(t, os.WriteFile(filepath.Join(root, path), []byte(text), 0o644))
	}
	return root
}

func TestMachine(t *testing.T) {
	root := tree(t, map[string]string{
		"sys/devices/system/cpu/online":                        "0-2,5\n",
		"sys/devices/system/cpu/isolated":                      "5\n",
		"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
		"sys/devices/system/cpu/cpu5/cpufreq/scaling_governor": "powersave\n",
		"proc/interrupts": "            CPU0       CPU1\n  9:  1  2  IO-APIC  acpi\n 40:  1  2  PCI-MSI  mlx5-eth1-3\n 41:  1  2  PCI-MSI  eth1-rx-0\n" +
			" 42:  1  2  PCI-MSI  eth10-rx-0\n 43:  1  2  PCI-MSI  eth1\n 44:  1  2  PCI-MSI  mlx5_comp7@pci:0000:03:00.0\n 45:  1  2  PCI-MSI  mlx5_async0@pci:0000:03:00.0\nNMI:  1  2  eth1\n",
		"proc/irq/40/smp_affinity_list": "0-2\n", "proc/irq/41/smp_affinity_list": "1\n", "proc/irq/42/smp_affinity_list": "1\n",
		"proc/irq/44/smp_affinity_list": "0-2\n", "proc/irq/44/effective_affinity_list": "2\n", "proc/irq/45/smp_affinity_list": "0\n",
		"sys/class/net/eth1/device/msi_irqs/44": "msix\n", "sys/class/net/eth1/device/msi_irqs/45": "msix\n", "sys/class/net/eth1/device/numa_node": "1\n",
		"sys/devices/system/node/node0/cpulist": "0-2\n", "sys/devices/system/node/node1/cpulist": "5\n",
	})
	f := Facts{Interface: "eth1"}
	f.machine(root)
	if f.CPUs != 4 || f.Isolated != "5" || f.Governors["performance"] != 1 || f.Governors["powersave"] != 1 ||
		!slices.Equal(f.Interrupts, []Interrupt{{40, "mlx5-eth1-3", "0-2", -1}, {41, "eth1-rx-0", "1", 0}, {44, "mlx5_comp7@pci:0000:03:00.0", "2", 7}}) ||
		f.Node != 1 || !slices.Equal(f.Nodes[1], []int{5}) || !slices.Equal(f.Nodes[0], []int{0, 1, 2}) {
		t.Errorf("%+v", f)
	}
	// The interrupts of a virtio card belong to the device above it.
	root = tree(t, map[string]string{
		"proc/interrupts":                "            CPU0\n 38:  1  PCI-MSIX  virtio2-input.0\n 39:  1  PCI-MSIX  virtio2-output.0\n 40:  1  PCI-MSIX  virtio3-input.0\n",
		"proc/irq/38/smp_affinity_list":  "0\n",
		"proc/irq/40/smp_affinity_list":  "0\n",
		"sys/devices/pci/msi_irqs/38":    "msix\n",
		"sys/devices/pci/msi_irqs/39":    "msix\n",
		"sys/devices/pci/numa_node":      "0\n",
		"sys/devices/pci/virtio2/uevent": "",
		"sys/class/net/eth2/ifindex":     "",
	})
	must(t, os.Symlink("../../../devices/pci/virtio2", filepath.Join(root, "sys/class/net/eth2/device")))
	f = Facts{Interface: "eth2"}
	f.machine(root)
	if f.Node != 0 || !slices.Equal(f.Interrupts, []Interrupt{{38, "virtio2-input.0", "0", 0}}) {
		t.Errorf("of virtio: %+v", f)
	}
	f = Facts{Interface: "eth1"}
	f.machine(t.TempDir())
	if f.CPUs != 0 || f.Isolated != "" || len(f.Governors)+len(f.Interrupts)+len(f.Nodes) != 0 || f.Node != NoNode {
		t.Errorf("of an empty tree: %+v", f)
	}
}

// A veth is recognised, and changes to it are found.
func TestLookAtVeth(t *testing.T) {
	n := udptest.New(t, lab.Cable{Queues: 2})
	root := tree(t, map[string]string{"sys/devices/system/cpu/online": "0-3\n", "sys/devices/system/cpu/isolated": "3\n"})
	look := func() (f Facts) {
		t.Helper()
		must(t, n.Server.Run(func() (err error) {
			f, err = Look(root, "eth0")
			return err
		}))
		return f
	}
	codes := func() (all []string) {
		for _, one := range Examine(look()) {
			all = append(all, one.Code)
		}
		return all
	}
	f := look()
	if !slices.ContainsFunc(f.Unknown, func(u string) bool { return strings.HasSuffix(u, "does its work on the sender's CPU") }) {
		t.Errorf("a veth has no interrupts, and not known is %q", f.Unknown)
	}
	if f.Driver != "veth" || f.MTU != 1500 || f.Queues != 2 || f.Program != "" || len(f.Features) < 10 {
		t.Errorf("%+v", f)
	}
	// Before Linux 6.3 the kernel does not report the features of a driver.
	known := f.XDP != nil
	if known && (*f.XDP&xdpBasic == 0 || *f.XDP&xdpZeroCopy != 0) || !known && !slices.ContainsFunc(f.Unknown, func(u string) bool { return strings.Contains(u, "Linux 6.3") }) {
		t.Errorf("XDP: %v, unknown: %q", f.XDP, f.Unknown)
	}
	without := []string{}
	if known {
		without = append(without, "copy")
	}
	if got := codes(); !slices.Equal(got, without) {
		t.Errorf("found %q, want %q", got, without)
	}
	must(t, n.Server.Run(func() error {
		h, err := hook.Attach(hook.Options{Interface: "eth0", Mode: kernel.ModeNative})
		if err != nil {
			return err
		}
		t.Cleanup(func() { must(t, h.Close()) })
		return nil
	}))
	if got := Examine(look()); got[0].Code != "occupied" || got[0].Fault || !strings.Contains(got[0].Text, "eth0 has the program of shunt's UDP path (program ") {
		t.Errorf("with shunt's program: found %+v", got)
	}
	must(t, n.Client.SetMTU("eth0", 9000))
	var err error
	must(t, n.Client.Run(func() error { f, err = Look(root, "eth0"); return err }))
	if got := Examine(f); len(got) == 0 || got[0].Code != "mtu" {
		t.Errorf("with a large MTU: %+v", got)
	}
	if _, err := Look(root, "none0"); err == nil || !strings.Contains(err.Error(), "`ip link` lists") {
		t.Errorf("%v", err)
	}
}
