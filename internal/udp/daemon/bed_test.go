package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lab"
	lb "github.com/shunt-lb/shunt/internal/lb/command"
	balancer "github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	"github.com/shunt-lb/shunt/internal/udp/command"
	"github.com/shunt-lb/shunt/internal/udp/daemon"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/test/next"
	"github.com/shunt-lb/shunt/udp"
)

const (
	// runVariable makes this binary `shunt run` with the file at the path.
	runVariable = "SHUNT_TEST_UDP_RUN"
	// workVariable makes it a program that leases: socket, name, and its time of work on each datagram.
	workVariable = "SHUNT_TEST_UDP_WORK"

	// rightsVariable confines `shunt run` to the rights that the package's unit gives the UDP path.
	rightsVariable = "SHUNT_TEST_UDP_RIGHTS"

	// sysVariable gives it a /sys of its network namespace first.
	sysVariable = "SHUNT_TEST_UDP_SYS"
	// keepVariable gives it --on-exit keep.
	keepVariable = "SHUNT_TEST_UDP_KEEP"
	// nextVariable makes it a version whose balancer has another ABI.
	nextVariable = "SHUNT_TEST_UDP_NEXT"
	// leftVariable has it print the settings of busy polling that an instance has left, and put them back as `shunt
	// uninstall` does.
	leftVariable = "SHUNT_TEST_UDP_LEFT"
	// detachVariable makes it `shunt detach --unattended` of an instance.
	detachVariable = "SHUNT_TEST_UDP_DETACH"

	nobody = 65534
)

// line is shunt with the balancer and the UDP path.
var line = lb.Line(func() []node.Product { return []node.Product{balancer.Product(balancer.Options{}), daemon.Product()} }, command.Product)

func TestMain(m *testing.M) {
	if os.Getenv(nextVariable) != "" {
		abi.Become(next.Version())
	}
	if os.Getenv(sysVariable) != "" {
		fmt.Println(execWithSys())
		os.Exit(1)
	}
	if instance := os.Getenv(leftVariable); instance != "" {
		left, err := daemon.LeftPolled()
		fmt.Println("left:", left[instance], err)
		fmt.Println("removed:", daemon.Product().Remove(instance, slog.New(slog.DiscardHandler)))
		left, err = daemon.LeftPolled()
		fmt.Println("left then:", left[instance], err)
		os.Exit(0)
	}
	if instance := os.Getenv(detachVariable); instance != "" {
		os.Exit(cli.Main(line, []string{"detach", "--unattended", "--instance", instance}, os.Stdin, os.Stdout, os.Stderr))
	}
	if path := os.Getenv(runVariable); path != "" {
		if os.Getenv(rightsVariable) != "" {
			fmt.Println(nodetest.Confine(node.DefaultNeeds([]node.Product{daemon.Product()}), rightsVariable))
			os.Exit(1)
		}
		args := []string{"run", "--config", path, "--instance", filepath.Base(filepath.Dir(path))}
		if os.Getenv(keepVariable) != "" {
			args = append(args, "--on-exit", "keep")
		}
		os.Exit(cli.Main(line, args, os.Stdin, os.Stdout, os.Stderr))
	}
	if words := strings.Fields(os.Getenv(workVariable)); len(words) == 3 {
		fmt.Println(work(words[0], words[1], words[2]))
		os.Exit(1)
	}
	os.Exit(nodetest.Main(m))
}

// execWithSys runs this binary again with a /sys of its network namespace. It returns if that fails.
func execWithSys() error {
	runtime.LockOSThread() // the mount namespace is the thread's until then
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return err
	}
	if err := unix.Mount("sysfs", "/sys", "sysfs", 0, ""); err != nil {
		return err
	}
	if err := unix.Mount("bpf", "/sys/fs/bpf", "bpf", 0, ""); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", os.Args, slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, sysVariable) }))
}

// work leases again and again, and echoes. It ends when SIGTERM has come, after it has read the datagrams in its rings.
func work(socket, name, each string) error {
	pause, err := time.ParseDuration(each)
	if err != nil {
		return err
	}
	for {
		l, err := udp.Open(context.Background(), udp.Options{Socket: socket, Name: name, Checked: true})
		if err != nil {
			time.Sleep(10 * time.Millisecond) // the broker is not there yet
			continue
		}
		fmt.Printf("serving %s\n", name)
		if err := errors.Join(udptest.Echo(l, pause), l.Close()); !errors.Is(err, udp.ErrBrokerGone) {
			fmt.Println("the lease is over:", err)
		}
	}
}

// bed is a client, and a server on which `shunt run` runs.
type bed struct {
	*nodetest.Daemon
	net   *udptest.Network
	asked int
	pid   int32             // of the daemon that was asked last
	sums  map[string]uint64 // datagrams that matched each lease then
}

func newBed(t *testing.T, entries ...string) *bed {
	t.Helper()
	n := udptest.New(t, lab.Cable{Queues: 2})
	b := &bed{Daemon: nodetest.New(t, n.Server), net: n}
	b.Look = b.grows
	b.Must(os.Chmod(b.Folder, 0o711)) // nobody has to reach it
	b.write(entries...)
	ctx, cancel := context.WithTimeout(context.Background(), nodetest.Patience)
	defer cancel()
	b.Must(n.Lab.Ready(ctx))
	for _, port := range []string{"5000", "5001"} {
		_, err := n.Server.ServeUDP("192.0.2.10:"+port, "kernel")
		b.Must(err)
	}
	return b
}

func entry(name string, port, queue int, more string) string {
	return fmt.Sprintf("{name: %s, interface: eth0, queues: [%d], address: 192.0.2.10, port: %d, allow: {user: %d}%s}", name, queue, port, nobody, more)
}

func (b *bed) socket() string { return filepath.Join(b.Folder, "udp.sock") }

func (b *bed) write(entries ...string) {
	b.Helper()
	text := fmt.Sprintf("udp_socket: %s\nudp:\n", b.socket())
	if len(entries) == 0 {
		text = strings.TrimSuffix(text, "\n") + " []\n"
	}
	for _, e := range entries {
		text += "  - " + e + "\n"
	}
	b.Write(text)
}

// run starts the daemon, and returns when it answers.
func (b *bed) run(variables ...string) {
	b.Helper()
	b.Run(append(variables, runVariable+"="+b.Config())...)
}

// work starts a program as nobody.
func (b *bed) work(name string, each time.Duration) *lab.Process {
	b.Helper()
	cmd := b.Self()
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	return b.Spawn(cmd, fmt.Sprintf("%s=%s %s %s", workVariable, b.socket(), name, each))
}

// grows requires that no sum of a daemon shrinks, also while a lease ends: Prometheus would take that for a new beginning.
func (b *bed) grows(st *shuntv1.GetStatusResponse) {
	b.Helper()
	if st.Daemon.Pid != b.pid {
		b.pid, b.sums = st.Daemon.Pid, map[string]uint64{}
	}
	for _, l := range st.Udp {
		if l.Total.Matched < b.sums[l.Name] {
			b.Errorf("of the lease %s %d datagrams had matched, and now %d have", l.Name, b.sums[l.Name], l.Total.Matched)
		}
		b.sums[l.Name] = l.Total.Matched
	}
}

func lease(st *shuntv1.GetStatusResponse, name string) *shuntv1.UDPLease {
	i := slices.IndexFunc(st.Udp, func(l *shuntv1.UDPLease) bool { return l.Name == name })
	if i < 0 {
		return &shuntv1.UDPLease{}
	}
	return st.Udp[i]
}

// until asks port 5000, from a new port each time, until the right one answers: "x" or "kernel".
func (b *bed) until(who string) {
	b.Helper()
	deadline := time.Now().Add(nodetest.Patience)
	for within := answersWithin; time.Now().Before(deadline); within = longer(within) {
		if answer := b.ask(5000, within); strings.HasPrefix(answer, who) {
			return
		}
		time.Sleep(time.Millisecond)
	}
	b.Fatalf("%s does not answer\n%s", who, b.Process.Log())
}

// answersWithin is the time in which a question is answered on a machine that has nothing else to do.
const answersWithin = 10 * time.Millisecond

// longer is the time to wait for the answer to the next question: a slow machine may answer none in the time before.
func longer(within time.Duration) time.Duration { return min(within*5/4, time.Second) }

// ask returns the answer to a question; "" if there is none within a time.
func (b *bed) ask(port int, within time.Duration) string {
	b.Helper()
	conn := b.dial(port)
	defer conn.Close() //nolint:errcheck // nothing is lost
	b.asked++
	if _, err := conn.Write([]byte("ask " + strconv.Itoa(b.asked))); err != nil {
		return ""
	}
	_ = conn.SetReadDeadline(time.Now().Add(within))
	buffer := make([]byte, 2048)
	n, err := conn.Read(buffer)
	if err != nil {
		return ""
	}
	return string(buffer[:n])
}

func (b *bed) dial(port int) net.Conn {
	b.Helper()
	conn, err := b.net.Client.Dial(context.Background(), "udp", fmt.Sprintf("192.0.2.10:%d", port))
	b.Must(err)
	return conn
}

// addVeth makes a pair of interfaces on the server.
func (b *bed) addVeth(name, peer string) {
	b.Helper()
	b.Must(b.net.Server.Run(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Flags = name, net.FlagUp
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer})
	}))
}

// removeLink removes an interface of the server.
func (b *bed) removeLink(name string) {
	b.Helper()
	b.Must(b.net.Server.Run(func() error {
		dev, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkDel(dev)
	}))
}
