package broker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/shunt-lb/shunt/udp"
	"golang.org/x/sys/unix"
)

// workerVariable makes this binary a worker: it leases "echo" from the broker at the path, and echoes.
const workerVariable = "SHUNT_TEST_UDP_BROKER"

// senderVariable makes it a process that writes its standard input to a connection that it has got.
const senderVariable = "SHUNT_TEST_UDP_SENDER"

// soak reports whether there is time for the long versions.
var soak = os.Getenv("SHUNT_SOAK") != ""

const (
	nobody = 65534
	// patience bounds every wait for something that takes milliseconds.
	patience = time.Minute
)

func TestMain(m *testing.M) {
	if path := os.Getenv(workerVariable); path != "" {
		fmt.Println(work(path))
		os.Exit(1)
	}
	if os.Getenv(senderVariable) != "" {
		message, err := io.ReadAll(os.Stdin)
		if err == nil {
			_, err = unix.Write(3, message)
		}
		fmt.Println(err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// work needs no capability, and complains if it has one. It ends when its lease is over, with the reason.
func work(path string) error {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	for _, line := range []string{"CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n", "CapBnd:", "Uid:\t65534\t"} {
		if !strings.Contains(string(text), line) {
			return fmt.Errorf("the worker has rights:\n%s", text)
		}
	}
	if _, err := unix.Socket(unix.AF_XDP, unix.SOCK_RAW, 0); !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("the worker could make an AF_XDP socket of its own: %v", err)
	}
	l, err := udp.Open(context.Background(), udp.Options{Socket: path, Name: "echo", Checked: true})
	if err != nil {
		return err
	}
	fmt.Printf("serving as %d in %s\n", os.Getpid(), l.Mode)
	return errors.Join(udptest.Echo(l, 0), l.Close())
}

// bed is a client and a server, whose interface the broker lends.
type bed struct {
	t              *testing.T
	client, server *lab.Host
	addresses      []netip.AddrPort // of the server: IPv4, IPv6
	broker         *Broker
	path           string
	conn           net.Conn // of the client, to the first address
	asked          *int     // questions on conn, of all copies of the bed
	stop           func()   // ends the flood of datagrams, if there is one
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newBed(t *testing.T, options Options) *bed {
	t.Helper()
	return newBedOf(t, 2, options)
}

// newBedOf has a number of queues.
func newBedOf(t *testing.T, queues int, options Options) *bed {
	t.Helper()
	n := udptest.New(t, lab.Cable{Queues: queues})
	folder := t.TempDir()
	must(t, os.Chmod(filepath.Dir(folder), 0o711)) // nobody connects to a socket below it
	b := &bed{t: t, asked: new(int), path: filepath.Join(folder, "s"), client: n.Client, server: n.Server, addresses: n.Addresses}
	var err error
	options.Socket, options.In = b.path, b.server.Run
	b.broker, err = Open(options)
	must(t, err)
	t.Cleanup(func() { must(t, b.broker.Close()) })
	must(t, b.broker.Apply([]Offer{b.offer()}))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	must(t, n.Lab.Ready(ctx))
	for _, address := range b.addresses {
		_, err := b.server.ServeUDP(address.String(), "kernel")
		must(t, err)
	}
	b.conn, err = b.client.Dial(ctx, "udp", b.addresses[0].String())
	must(t, err)
	t.Cleanup(func() { _ = b.conn.Close() })
	return b
}

func user(id uint32) Rule { return Rule{User: &id} }

// offer is the name that workers ask for.
func (b *bed) offer() Offer {
	return Offer{Name: "echo", Interface: "eth0", Addresses: slices.Clone(b.addresses), Mode: xsk.Auto, RingSize: 64, Transmit: true, Allow: []Rule{user(nobody), user(0)}}
}

// worker starts one as nobody, with namespaces of its own for mounts, processes and the network, as a container has
// them.
func (b *bed) worker() *lab.Process {
	b.t.Helper()
	// By this path it is found also where its folder is closed to others.
	cmd := b.server.Command(context.Background(), "/proc/self/exe")
	cmd.Env = []string{workerVariable + "=" + b.path}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: nobody, Gid: nobody},
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET,
	}
	p, err := cmd.Spawn()
	must(b.t, err)
	b.t.Cleanup(func() { b.kill(p) })
	return p
}

func (b *bed) kill(p *lab.Process) {
	_ = p.Process.Kill()
	<-p.Ended
}

// ask asks a question, and waits a millisecond until the right one answers it, or one from number since on. Others'
// answers do not end the wait, so that asking again and again leaves the CPU to the answering programs.
func (b *bed) ask(who string, since int) bool {
	prefix := map[string]string{"xsk": "xsk ", "kernel": "kernel\n"}[who]
	*b.asked++
	until := time.Now().Add(time.Millisecond)
	if _, err := fmt.Fprintf(b.conn, "ask %d", *b.asked); err != nil {
		time.Sleep(time.Until(until)) // nobody had the port when an earlier question came (ECONNREFUSED)
		return false
	}
	_ = b.conn.SetReadDeadline(until)
	buffer := make([]byte, 2048)
	for {
		n, err := b.conn.Read(buffer)
		if err != nil {
			return false
		}
		text := string(buffer[:n])
		number, err := strconv.Atoi(text[strings.LastIndexByte(text, ' ')+1:])
		if err == nil && number >= since && strings.HasPrefix(text, prefix) {
			return true
		}
	}
}

// until asks until the right one answers, and returns the time that it took.
func (b *bed) until(who string, p *lab.Process) time.Duration {
	b.t.Helper()
	since, begin := *b.asked+1, time.Now()
	for time.Since(begin) < patience {
		if b.ask(who, since) {
			return time.Since(begin)
		}
	}
	log := ""
	if p != nil {
		log = p.Log()
	}
	b.t.Fatalf("%s does not answer; the worker said %q, the broker %+v", who, log, b.broker.Status())
	return 0
}

// is waits until a condition on the only offer holds, and returns the offer.
func (b *bed) is(what string, condition func(OfferStatus) bool) OfferStatus {
	b.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		o := b.broker.Status().Offers[0]
		if condition(o) {
			return o
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("%s: not within %s: %+v", what, patience, o)
		}
		time.Sleep(time.Millisecond)
	}
}

// raw is a client that can send any message.
type raw struct {
	t    *testing.T
	conn *proto.Conn
}

func (b *bed) raw() *raw {
	b.t.Helper()
	c, err := proto.Dial(context.Background(), b.path)
	must(b.t, err)
	b.t.Cleanup(func() { _ = c.Close() })
	return &raw{b.t, c}
}

func (r *raw) send(body proto.Body, files ...int) *raw {
	r.t.Helper()
	must(r.t, r.conn.Send(body, patience, files...))
	return r
}

func (r *raw) hear() (proto.Body, []int) {
	r.t.Helper()
	body, files, _, err := r.conn.Receive(time.Now().Add(patience))
	must(r.t, err)
	return body, files
}

// end expects the last message.
func (r *raw) end(code proto.Code, text string) {
	r.t.Helper()
	for {
		body, files := r.hear()
		closeFiles(files)
		if end, ok := body.(*proto.End); ok {
			if end.Code != code || !strings.Contains(proto.Text(end.Text[:]), text) {
				r.t.Errorf("%s: %s; want %s: %s", end.Code, proto.Text(end.Text[:]), code, text)
			}
			return
		}
	}
}

// ask is greeted, and asks for a name.
func (r *raw) ask(name string) *raw {
	r.t.Helper()
	r.send(&proto.Hello{Magic: proto.Magic, VersionMin: 1, VersionMax: 1})
	body, _ := r.hear()
	request := &proto.Request{Nonce: body.(*proto.Welcome).Nonce}
	proto.Put(request.Name[:], name)
	return r.send(request)
}

// hold has a lease: its number, and the sockets. Before it says that it is ready, it calls before with them.
func (r *raw) hold(name string, before ...func(*xsk.Set)) (uint64, *xsk.Set) {
	r.t.Helper()
	body, files := r.ask(name).hear()
	grant, ok := body.(*proto.Grant)
	if !ok {
		r.t.Fatalf("%T: %+v", body, body)
	}
	set, err := xsk.AdoptSet(grant.Layouts(), files)
	must(r.t, err)
	r.t.Cleanup(func() { must(r.t, set.Close()) })
	for _, do := range before {
		do(set)
	}
	body, _ = r.send(&proto.Ready{Lease: grant.Lease}).hear()
	if _, ok := body.(*proto.Serving); !ok {
		r.t.Fatalf("%T: %+v", body, body)
	}
	return grant.Lease, set
}

func mustAddress(t *testing.T, text string) netip.AddrPort {
	t.Helper()
	a, err := netip.ParseAddrPort(text)
	must(t, err)
	return a
}
