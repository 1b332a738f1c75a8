package products_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/shunt-lb/shunt/internal/pod/bed/bedtest"
	"github.com/shunt-lb/shunt/internal/products"
	"github.com/spf13/cobra"
)

const (
	// runVariable makes this binary `shunt run` with the file at the path.
	runVariable = "SHUNT_TEST_PRODUCTS_RUN"
	// confineVariable confines it to the needs of the file.
	confineVariable = "SHUNT_TEST_PRODUCTS_CONFINE"
	// withoutVariable removes from these the needs with this value.
	withoutVariable = "SHUNT_TEST_PRODUCTS_WITHOUT"
)

// shunt has the commands about the daemon alone.
func shunt(s cli.Streams) *cobra.Command { return cli.Root(s, products.All) }

func TestMain(m *testing.M) {
	if path := os.Getenv(runVariable); path != "" {
		if os.Getenv(confineVariable) != "" {
			fmt.Println(confine(path))
			os.Exit(1)
		}
		os.Exit(cli.Main(shunt, []string{"run", "--config", path, "--instance", filepath.Base(filepath.Dir(path))}, os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(nodetest.Main(m))
}

func confine(path string) error {
	read, err := node.Format(products.All()).Read(path)
	if err != nil {
		return err
	}
	needs := slices.DeleteFunc(node.NeedsOf(products.All(), read), func(n node.Need) bool { return n.Value == os.Getenv(withoutVariable) })
	return nodetest.Confine(needs, confineVariable)
}

const unitPath = "../../packaging/systemd/shunt.service"

// The package's unit permits the needs of the products by default, and nothing else.
func TestUnitIsTheUnionOfNeeds(t *testing.T) {
	text, err := os.ReadFile(unitPath)
	if err != nil {
		t.Fatal(err)
	}
	unit := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		if name, values, is := strings.Cut(strings.TrimSpace(line), "="); is {
			unit[name] = append(unit[name], strings.Fields(values)...)
		}
	}
	calls := unit[node.NeedCall]
	if begin := []string{"@system-service", "~@privileged", "@resources"}; len(calls) < 3 || !slices.Equal(calls[:3], begin) {
		t.Fatalf("the unit permits the calls %q, want %q first: the needs of products come on top of those", calls, begin)
	}
	unit[node.NeedCall] = calls[3:]
	needs := node.DefaultNeeds(products.All())
	for _, setting := range []string{node.NeedCapability, node.NeedFamily, node.NeedPath, node.NeedMemory, node.NeedCall} {
		have := slices.Sorted(slices.Values(unit[setting]))
		if want := node.NeedValues(needs, setting); !slices.Equal(have, want) {
			t.Errorf("%s: the unit has %q, the products need %q", setting, have, want)
		}
	}
	if unit["ProtectProc"] != nil {
		t.Errorf("ProtectProc=%q hides the cgroup of a process that asks for a lease", unit["ProtectProc"])
	}
}

const (
	balancer = "interfaces: [{name: eth9}]\nservices: [{name: web, address: \"2001:db8::10\", port: 80, backends: [{address: \"2001:db8:1::2\"}]}]\n"
	udpPath  = "udp: [{name: feed, interface: eth1, address: 192.0.2.10, port: 54, allow: {user: root}}]\n"
	shortcut = "accelerate: {interfaces: \"nosuch*\"}\n"
)

// needsOf are the needs of a file that an empty file does not have, by value.
func needsOf(t *testing.T, text string) (values []string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	read, err := node.Format(products.All()).Read(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range node.NeedsOf(products.All(), read) {
		if !slices.Contains(node.DefaultNeeds(nil), n) {
			values = append(values, n.Value)
		}
	}
	slices.Sort(values)
	return slices.Compact(values)
}

// A file needs the capabilities and sockets of its products, and more only where its settings ask for
// it.
func TestNeedsFollowTheFile(t *testing.T) {
	const programs, netAdmin, raw, perfmon = "CAP_BPF", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_PERFMON"
	loopback := []string{"-/proc/sys/net/ipv4/conf/lo", "-/proc/sys/net/ipv6/conf/lo"}
	ofBalancer := append(loopback, "AF_INET", "AF_INET6", "AF_PACKET", programs, netAdmin, raw, perfmon, "bpf")
	ofUDP := []string{"AF_XDP", programs, netAdmin, raw, perfmon, "bpf", "infinity"}
	for _, c := range []struct {
		text string
		want []string
		more string
	}{
		{balancer, ofBalancer, ""},
		{strings.Replace(balancer, "port: 80,", "port: 80, forwarding: dsr-l2,", 1), ofBalancer, "-/proc/sys/net/ipv6/conf"},
		{balancer + "decapsulation: {from: [192.0.2.0/24]}\n", ofBalancer, "-/proc/sys/net/ipv4/conf"},
		{balancer + "api: {socket: /run/elsewhere/shunt.sock}\n", ofBalancer, "-/run/elsewhere"},
		{balancer + "api: {socket: /run/shunt/deeper/shunt.sock}\n", ofBalancer, ""},
		{udpPath, ofUDP, ""},
		{udpPath + "udp_socket: /run/feeds/udp.sock\n", ofUDP, "-/run/feeds"},
		{strings.Replace(udpPath, "port: 54,", "port: 54, kill: true,", 1), ofUDP, "CAP_KILL"},
		{strings.Replace(udpPath, "port: 54,", "port: 54, busy_poll: 200us,", 1), ofUDP, "no"},
		{shortcut, []string{"AF_INET", "AF_INET6", programs, netAdmin, raw, perfmon, "bpf"}, ""},
	} {
		want := slices.Clone(c.want)
		if c.more != "" {
			want = append(want, c.more)
		}
		slices.Sort(want)
		if have := needsOf(t, c.text); !slices.Equal(have, want) {
			t.Errorf("%s\nneeds %q\nwant  %q", c.text, have, want)
		}
	}
}

// systemd accepts the unit with the drop-in of each file without a warning.
func TestDropInsAreUnits(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	text, err := os.ReadFile(unitPath)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	unit, dropIn := filepath.Join(folder, "shunt.service"), filepath.Join(folder, "shunt.service.d", "needs.conf")
	if err := os.Mkdir(filepath.Dir(dropIn), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(unit, bytes.ReplaceAll(text, []byte("/usr/bin/shunt"), []byte("/bin/true")), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{balancer, udpPath, shortcut, balancer + udpPath + shortcut,
		strings.Replace(udpPath, "port: 54,", "port: 54, kill: true, busy_poll: 200us,", 1),
		balancer + "api: {socket: '/run/with%y/shunt.sock'}\n"} {
		config := filepath.Join(folder, "shunt.yaml")
		if err := os.WriteFile(config, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		var out, faults bytes.Buffer
		if code := cli.Main(shunt, []string{"check", "--unit", "--config", config}, nil, &out, &faults); code != 0 {
			t.Fatalf("shunt check --unit: exit code %d\n%s", code, faults.String())
		}
		if err := os.WriteFile(dropIn, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		verify := exec.Command(analyze, "verify", "--man=no", unit)
		verify.Env = append(os.Environ(), "SYSTEMD_UNIT_PATH="+folder+":")
		if said, err := verify.CombinedOutput(); err != nil || len(said) > 0 {
			t.Errorf("systemd-analyze verify: %v\n%s\nof\n%s", err, said, out.String())
		}
		security := exec.Command(analyze, "security", "--offline=true", "--no-pager", unit)
		security.Env = verify.Env
		said, _ := security.CombinedOutput()
		for mark, granted := range map[string]bool{"CAP_KILL": strings.Contains(file, "kill: true"), "AF_PACKET": strings.Contains(file, "services:")} {
			if refused := strings.Contains(line(said, mark), "✓"); refused == granted {
				t.Errorf("systemd-analyze security: %q, with\n%s", line(said, mark), file)
			}
		}
		t.Log(line(said, "Overall exposure"))
	}
}

// line is the first line with a text.
func line(text []byte, with string) string {
	for l := range strings.Lines(string(text)) {
		if strings.Contains(l, with) {
			return l
		}
	}
	return ""
}

// Each product works with its declared needs, and with no other capability or kind of socket.
func TestNeedsSuffice(t *testing.T) {
	b, _ := bedtest.New(t, 2)
	for product, keys := range map[string]string{
		"balancer":   balancerOn(b.Interface(0)),
		"udp":        fmt.Sprintf("udp: [{name: feed, interface: %s, address: 192.0.2.10, port: 54, allow: {user: root}}]\n", b.Interface(0)),
		"accelerate": "accelerate: {interfaces: all}\n",
	} {
		t.Run(product, func(t *testing.T) {
			d := nodetest.New(t, b.Node)
			if product == "udp" {
				keys += fmt.Sprintf("udp_socket: %s\n", filepath.Join(d.Folder, "udp.sock"))
			}
			d.Write(keys)
			d.Run(runVariable+"="+d.Config(), confineVariable+"=1")
			d.Is("nothing is refused", func(st *shuntv1.GetStatusResponse) bool {
				return len(st.Daemon.Products) == 1 && st.Daemon.Products[0].Failed == "" && !slices.ContainsFunc(st.Daemon.Conditions, func(c *shuntv1.Condition) bool {
					return strings.Contains(c.Text, "not permitted") || strings.Contains(c.Text, "not supported by protocol")
				})
			})
			d.Must(d.Process.End(syscall.SIGINT, nodetest.Patience))
		})
	}
}

func balancerOn(iface string) string {
	return fmt.Sprintf("interfaces: [{name: %s, attach: native}]\nservices: [{name: web, address: 192.0.2.10, port: 80, backends: [{address: 10.0.0.2}]}]\n", iface)
}

// A sandbox without a need refuses the operation: otherwise TestNeedsSuffice would prove nothing.
func TestNeedsAreMissed(t *testing.T) {
	b, _ := bedtest.New(t, 1)
	for need, want := range map[string]string{
		"AF_PACKET":     "open a packet socket: address family not supported by protocol",
		"CAP_NET_RAW":   "open a packet socket: operation not permitted",
		"CAP_NET_ADMIN": "operation not permitted",
	} {
		d := nodetest.New(t, b.Node)
		d.Write(balancerOn(b.Interface(0)))
		p := d.Spawn(d.Self(), runVariable+"="+d.Config(), confineVariable+"=1", withoutVariable+"="+need)
		select {
		case <-p.Ended:
		case <-time.After(nodetest.Patience):
			t.Fatalf("the balancer runs without %s", need)
		}
		if !strings.Contains(p.Log(), want) {
			t.Errorf("without %s the balancer does not say %q:\n%s", need, want, p.Log())
		}
	}
}
