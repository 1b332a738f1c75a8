package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/node/nodetest"
	pod "github.com/shunt-lb/shunt/internal/pod/daemon"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
)

// connectAt is a connection between the pods at a port.
func (w *world) connectAt(port uint16) (c, s net.Conn) {
	w.Helper()
	l, err := w.Pods[1].Listen("tcp", netip.AddrPortFrom(w.Address(1, false), port).String())
	w.Must(err)
	defer l.Close() //nolint:errcheck // it has accepted
	ctx, cancel := context.WithTimeout(context.Background(), nodetest.Patience)
	defer cancel()
	c, err = w.Pods[0].Dial(ctx, "tcp", l.Addr().String())
	w.Must(err)
	s, err = l.Accept()
	w.Must(err)
	w.Cleanup(func() { _, _ = c.Close(), s.Close() })
	for _, one := range []net.Conn{c, s} {
		w.Must(one.SetDeadline(time.Now().Add(nodetest.Patience)))
	}
	return c, s // send has deadlines of its own
}

// Unless the file says which features programs do not use, a kernel that breaks one pairs no sockets, and the condition
// names it. If it says so, sockets are paired, counted and shown, and go on when the daemon ends.
func TestSockets(t *testing.T) {
	w := newWorld(t, 2, "")
	path, leave, err := lab.EnterCgroup(fmt.Sprintf("shunt-pd-%d", os.Getpid()))
	w.Must(err)
	w.Cleanup(func() { w.Must(leave()) })
	w.Must(w.Node.SetUp("lo", true))
	w.Write("accelerate: {sockets: {cgroups: " + path + "}}")
	w.run()
	st := w.Is("the kernel was tried", func(st *shuntv1.GetStatusResponse) bool { return len(st.Acceleration.GetSockets().GetChecks()) > 0 })
	broken := []string{}
	for _, c := range st.Acceleration.Sockets.Checks {
		if c.Broken != "" {
			broken = append(broken, c.Name)
		}
	}
	if len(broken) > 0 {
		text := nodetest.Condition(st, "sockets_refused", "sockets")
		if st.Acceleration.Sockets.State != "refused" || !strings.Contains(text, "this kernel breaks "+broken[0]) || !strings.Contains(text, "write unused: ["+strings.Join(broken, ", ")) {
			t.Errorf("%v are broken, the state is %v, the condition says %q", broken, st.Acceleration.Sockets, text)
		}
		c, s := w.connectAt(8080)
		w.Must(send(c, s, 100_000))
	}
	file := fmt.Sprintf("accelerate: {sockets: {cgroups: %s, ports: [8080, 9000-9010], limit: 1MiB, unused: [%s]}}", path, strings.Join(sockets.Waivable(), ", "))
	w.Write(file)
	if text := w.Reload(); !strings.Contains(text, "accelerate sockets ports: all -> 8080, 9000-9010") {
		t.Errorf("the difference is %q", text)
	}
	w.Is("sockets are paired", func(st *shuntv1.GetStatusResponse) bool {
		return st.Acceleration.Sockets.GetState() == "paired" && nodetest.Condition(st, "sockets_refused", "sockets") == ""
	})
	c, s := w.connectAt(9001)
	w.Must(send(c, s, 100_000))
	st, err = w.Ask()
	w.Must(err)
	if p := st.Acceleration.Sockets; p.Paired != 2 || p.Counts["taken"].GetPackets() == 0 || p.Counts["joined"].GetPackets() != 1 {
		t.Errorf("the status is %v", p)
	}
	for words, want := range map[string]string{
		"accelerate list": "SOCKETS OF", "accelerate show sockets": "carry", "status": path, "accelerate show sockets -o json": `"joined"`,
	} {
		if out := w.command(words); !strings.Contains(out, want) {
			t.Errorf("shunt %s says\n%s\nwithout %q", words, out, want)
		}
	}
	for _, want := range []string{"shunt_accelerate_sockets 2", `shunt_accelerate_socket_messages_total{reason="taken"} `, `shunt_accelerate_socket_connections_total{outcome="joined"} 1`} {
		if text := w.Scrape(); !strings.Contains(text, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}

	w.Must(w.Process.Process.Signal(syscall.SIGKILL))
	<-w.Process.Ended
	w.Must(send(c, s, 100_000))
	w.run()
	c2, s2 := w.connectAt(8080)
	w.Must(send(c2, s2, 100_000))
	w.Must(send(c, s, 100_000))
	w.Is("the new connection is paired, and the old one is not", func(st *shuntv1.GetStatusResponse) bool { return st.Acceleration.Sockets.Paired == 2 })
	w.Must(w.Process.End(syscall.SIGINT, nodetest.Patience))
	w.Must(send(c2, s2, 100_000))
	w.Must(send(c, s, 100_000))
	if left, _ := filepath.Glob("/sys/fs/bpf/shunt/_sockets/" + filepath.Base(w.Folder) + "/*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A daemon that is killed, or told to stop, leaves the pairs whose data is not read. `shunt detach` says so, loses nothing, and takes
// them apart once it can.
func TestDetachTakesPairsApart(t *testing.T) {
	w := newWorld(t, 2, "")
	path, leave, err := lab.EnterCgroup(fmt.Sprintf("shunt-pdd-%d", os.Getpid()))
	w.Must(err)
	w.Cleanup(func() { w.Must(leave()) })
	w.Must(w.Node.SetUp("lo", true))
	w.Write(fmt.Sprintf("accelerate: {sockets: {cgroups: %s, unused: [%s]}}", path, strings.Join(sockets.Waivable(), ", ")))
	instance := filepath.Base(w.Folder)
	folder := "/sys/fs/bpf/shunt/_sockets/" + instance
	detach := func() (code int, text string) {
		var out strings.Builder
		code = cli.Main(line, []string{"detach", "--instance", instance, "--socket", w.Socket()}, nil, &out, &out)
		return code, out.String()
	}
	for _, how := range []string{"killed", "told to stop", "killed with the data read"} {
		w.Process = w.Spawn(w.Self(), runVariable+"="+w.Config()) // not Run, after which it may not fail
		w.Is("sockets are paired", func(st *shuntv1.GetStatusResponse) bool { return st.Acceleration.Sockets.GetState() == "paired" })
		c, s := w.connectAt(8080)
		w.Must(send(c, s, 1000))
		data := strings.Repeat("not read yet ", 10_000)
		_, err := c.Write([]byte(data))
		w.Must(err)
		read := func() {
			got := make([]byte, len(data))
			if _, err := io.ReadFull(s, got); err != nil || string(got) != data {
				t.Errorf("%s: what waited has not arrived: %v", how, err)
			}
		}
		if how == "killed with the data read" {
			read()
		}
		if how != "told to stop" {
			w.Must(w.Process.Process.Signal(syscall.SIGKILL))
			<-w.Process.Ended
		}
		if how != "killed with the data read" {
			code, text := detach()
			if code != 1 || !strings.Contains(text, "let the programs read or end") || !strings.Contains(text, folder) {
				t.Errorf("%s, and not read: shunt detach ends with %d: %s", how, code, text)
			}
			if left, err := pod.LeftPairs(); err != nil || left[instance] != folder {
				t.Errorf("%s: pairs are left in %v, %v", how, left, err)
			}
			if err := w.Process.Err(); (err != nil) != (how == "told to stop") {
				t.Errorf("%s: the daemon has ended with %v:\n%s", how, err, w.Process.Log())
			}
			read()
		}
		if code, text := detach(); code != 0 {
			t.Errorf("%s, and read: shunt detach ends with %d: %s", how, code, text)
		}
		if _, err := os.Stat(folder); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %s is left, %v", how, folder, err)
		}
		w.Must(send(c, s, 100_000))
		c.Close() //nolint:errcheck // the next one has the same port
		s.Close() //nolint:errcheck
	}
}

// send sends so many bytes, which differ, both ways.
func send(a, b net.Conn, size int) error {
	for range 2 {
		deadline := time.Now().Add(nodetest.Patience)
		if err := errors.Join(a.SetDeadline(deadline), b.SetDeadline(deadline)); err != nil {
			return err
		}
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(i ^ i>>8)
		}
		sent := make(chan error, 1)
		go func() {
			_, err := a.Write(data)
			sent <- err
		}()
		got := make([]byte, size)
		if _, err := io.ReadFull(b, got); err != nil {
			return err
		}
		if string(got) != string(data) {
			return errors.New("other data has arrived")
		}
		if err := <-sent; err != nil {
			return err
		}
		a, b = b, a
	}
	return nil
}
