package broker

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gopacket/gopacket/pcapgo"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// example builds one of the Go package's examples.
func (b *bed) example(name string) (binary string) {
	b.t.Helper()
	binary = filepath.Join(filepath.Dir(b.path), name)
	build := exec.Command("go", "build", "-o", binary, "./../../../udp/examples/"+name)
	if out, err := build.CombinedOutput(); err != nil {
		b.t.Fatalf("%v: %s", err, out)
	}
	return binary
}

// start starts an example as nobody in the server's namespace.
func (b *bed) start(binary string, args ...string) *lab.Process {
	b.t.Helper()
	cmd := b.server.Command(context.Background(), binary, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	p, err := cmd.Spawn()
	must(b.t, err)
	b.t.Cleanup(func() { b.kill(p) })
	return p
}

func needsGo(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command, to build the example")
	}
}

// The Go package's examples work as documented.
func TestExampleEcho(t *testing.T) {
	needsGo(t)
	b := newBed(t, Options{})
	b.echoes(b.example("echo"), "--listen", "192.0.2.10:5001")
}

func TestExamplePcap(t *testing.T) {
	needsGo(t)
	b := newBed(t, Options{})
	b.writes(b.example("pcap"))
}

// The examples in C work, too, with each compiler.
func TestExamplesInC(t *testing.T) {
	b := newBed(t, Options{})
	folder := filepath.Dir(b.path)
	udptest.EachCompiler(t, func(t *testing.T, c udptest.Compiler) {
		on := *b
		on.t = t
		on.echoes(c.Program(t, folder, "../../../udp/c/examples/echo.c"), "--address", "192.0.2.10", "--port", "5001")
		on.writes(c.Program(t, folder, "../../../udp/c/examples/pcap.c"))
	})
}

// A program in C keeps its lease over several terms, sends frames of its own, and counts as the broker does.
func TestAccountInC(t *testing.T) {
	b := newBed(t, Options{Term: 300 * time.Millisecond})
	udptest.EachCompiler(t, func(t *testing.T, c udptest.Compiler) {
		on := *b
		on.t = t
		binary := c.Program(t, filepath.Dir(b.path), "../../../udp/c/testdata/check.c")
		p := on.start(binary, "account", b.path, "100")
		on.until("xsk", p)
		on.until("kernel", p) // it has ended
		<-p.Ended
		if err := p.Err(); err != nil {
			t.Fatalf("%v: %s", err, p.Log())
		}
		over := func(o OfferStatus) bool { return o.Lease == nil && o.Ended[endedClosed]+o.Ended[endedDied] == o.Given }
		if o := on.is("the lease is over", over); o.Past.Lost() != 0 || o.Past.Matched < 100 {
			t.Errorf("%+v", o)
		}
	})
}

// echoes requires that a program answers over its lease, and over its own kernel socket once the offer is taken back.
func (b *bed) echoes(binary string, listen ...string) {
	t := b.t
	t.Helper()
	second := b.addresses[0].Addr().String() + ":5001"
	offer := b.offer()
	offer.Addresses[0] = mustAddress(t, second)
	must(t, b.broker.Apply([]Offer{offer}))
	conn, err := b.client.Dial(context.Background(), "udp", second)
	must(t, err)
	defer conn.Close() //nolint:errcheck // all is sent
	p := b.start(binary, append([]string{"--socket", b.path, "--name", "echo"}, listen...)...)
	defer b.kill(p)
	number := 0
	echoes := func() bool {
		number++
		question, answer := fmt.Appendf(nil, "question %d", number), make([]byte, 64)
		must(t, conn.SetDeadline(time.Now().Add(500*time.Millisecond))) // a question that nobody takes is lost, and another one is asked
		if _, err := conn.Write(question); err != nil {
			return false
		}
		for { // answers to earlier questions may be late
			n, err := conn.Read(answer)
			if err != nil || bytes.Equal(answer[:n], question) {
				return err == nil
			}
		}
	}
	o := b.is("datagrams are taken", func(o OfferStatus) bool {
		return echoes() && o.Lease != nil && o.Lease.Queues[0].Taken+o.Lease.Queues[1].Taken > 0
	})
	if o.Lease.Holder.UID != nobody || !strings.Contains(p.Log(), " in copy mode\n") {
		t.Errorf("held by %s, which said %q", o.Lease.Holder, p.Log())
	}
	offer.Allow = []Rule{user(1)}
	must(t, b.broker.Apply([]Offer{offer}))
	b.is("the kernel's socket echoes", func(o OfferStatus) bool { return o.Lease == nil && echoes() })
	select {
	case <-p.Ended:
		t.Errorf("it ended: %s", p.Log())
	default:
	}
}

// writes requires that a program's file has the sent datagrams, frame by frame.
func (b *bed) writes(binary string) {
	t := b.t
	t.Helper()
	offer := b.offer()
	offer.Transmit, offer.Mode = false, xsk.Copy
	must(t, b.broker.Apply([]Offer{offer}))
	file, err := os.CreateTemp("", "shunt-*.pcap")
	must(t, err)
	t.Cleanup(func() { _ = file.Close(); must(t, os.Remove(file.Name())) })
	must(t, file.Chown(nobody, nobody))
	p := b.start(binary, "--socket", b.path, "--name", "echo", "--count", "10", "--write", file.Name())
	b.is("a lease", func(o OfferStatus) bool {
		select {
		case <-p.Ended:
			t.Fatalf("it ended: %s", p.Log())
		default:
		}
		return o.Lease != nil
	})
	for range 10 {
		_, err := b.conn.Write([]byte("to be written"))
		must(t, err)
	}
	select {
	case <-p.Ended:
	case <-time.After(patience):
		t.Fatalf("it has not seen 10 datagrams: %s", p.Log())
	}
	must(t, p.Err())
	if !strings.Contains(p.Log(), " in copy mode\n") {
		t.Errorf("it said %q", p.Log())
	}
	reader, err := pcapgo.NewReader(file)
	must(t, err)
	for i := range 10 {
		frame, _, err := reader.ReadPacketData()
		must(t, err)
		packet, err := xsk.Parse(frame)
		must(t, err)
		if string(packet.Payload) != "to be written" || packet.Destination != b.addresses[0] {
			t.Errorf("frame %d: %+v", i, packet)
		}
	}
}
