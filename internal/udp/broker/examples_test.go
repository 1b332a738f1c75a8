package broker

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/gopacket/gopacket/pcapgo"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

// example builds one of the examples, and starts it as nobody in the server's namespace.
func (b *bed) example(name string, args ...string) *lab.Process {
	b.t.Helper()
	binary := filepath.Join(filepath.Dir(b.path), name)
	build := exec.Command("go", "build", "-o", binary, "./../../../udp/examples/"+name)
	if out, err := build.CombinedOutput(); err != nil {
		b.t.Fatalf("%v: %s", err, out)
	}
	cmd := b.server.Command(context.Background(), binary, append([]string{"--socket", b.path}, args...)...)
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

// The echo answers over its lease, and over its own kernel socket once the offer is taken back.
func TestExampleEcho(t *testing.T) {
	needsGo(t)
	b := newBed(t, Options{})
	second := b.addresses[0].Addr().String() + ":5001"
	offer := b.offer()
	offer.Addresses[0] = mustAddress(t, second)
	must(t, b.broker.Apply([]Offer{offer}))
	conn, err := b.client.Dial(context.Background(), "udp", second)
	must(t, err)
	defer conn.Close() //nolint:errcheck // it has sent what it had to
	p := b.example("echo", "--name", "echo", "--listen", second)
	echoes := func() bool {
		question, answer := []byte("hello"), make([]byte, 64)
		must(t, conn.SetDeadline(time.Now().Add(50*time.Millisecond)))
		if _, err := conn.Write(question); err != nil {
			return false
		}
		n, err := conn.Read(answer)
		return err == nil && bytes.Equal(answer[:n], question)
	}
	o := b.is("datagrams are taken", func(o OfferStatus) bool {
		return echoes() && o.Lease != nil && o.Lease.Queues[0].Taken+o.Lease.Queues[1].Taken > 0
	})
	if o.Lease.Holder.UID != nobody {
		t.Errorf("held by %s", o.Lease.Holder)
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

// The file has what was sent, frame by frame.
func TestExamplePcap(t *testing.T) {
	needsGo(t)
	b := newBed(t, Options{})
	offer := b.offer()
	offer.Transmit, offer.Mode = false, xsk.Copy
	must(t, b.broker.Apply([]Offer{offer}))
	file, err := os.CreateTemp("", "shunt-*.pcap")
	must(t, err)
	t.Cleanup(func() { _ = file.Close(); must(t, os.Remove(file.Name())) })
	must(t, file.Chown(nobody, nobody))
	p := b.example("pcap", "--name", "echo", "--count", "10", "--write", file.Name())
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
