package lease

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"golang.org/x/sys/unix"
)

// workerVariable makes this binary a worker, which takes a lease at descriptor 3 and echoes.
const workerVariable = "SHUNT_TEST_UDP_WORKER"

func TestMain(m *testing.M) {
	if os.Getenv(workerVariable) != "" {
		fmt.Fprintln(os.Stderr, work())
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// work needs no capability, and says if it has one.
func work() error {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	for _, set := range []string{"CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n", "Uid:\t65534\t"} {
		if !strings.Contains(string(text), set) {
			return fmt.Errorf("the worker has rights:\n%s", text)
		}
	}
	if _, err := unix.Socket(unix.AF_XDP, unix.SOCK_RAW, 0); !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("the worker could make an AF_XDP socket of its own: %v", err)
	}
	_, held, err := Take(3)
	if err != nil {
		return err
	}
	qs, err := held.Queues(true)
	if err != nil {
		return err
	}
	return serve(qs, held.Sockets, func() bool { return false })
}

// hand starts a worker as nobody, without capabilities, and gives it the lease.
func (b *bed) hand(l *Lease) *lab.Process {
	b.t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must(b.t, err)
	theirs := os.NewFile(uintptr(pair[1]), "worker")
	// By this path it is found also where its folder is closed to others.
	cmd := b.server.Command(context.Background(), "/proc/self/exe")
	cmd.Env = []string{workerVariable + "=1"}
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	worker, err := cmd.Spawn()
	must(b.t, err)
	b.t.Cleanup(func() { _ = worker.End(syscall.SIGKILL, 5*time.Second) })
	must(b.t, theirs.Close())
	must(b.t, Hand(pair[0], l))
	must(b.t, l.Bind())
	must(b.t, unix.Close(pair[0]))
	return worker
}

// until asks until the one who should answers, and says how long it took.
func (b *bed) until(who string, worker *lab.Process) time.Duration {
	b.t.Helper()
	begin := time.Now()
	conn, err := b.client.Dial(context.Background(), "udp", b.addresses[0].String())
	must(b.t, err)
	defer conn.Close() //nolint:errcheck // it has sent what it had to
	for time.Since(begin) < 5*time.Second {
		if got, err := askOn(conn, 20*time.Millisecond); err == nil && got == who {
			return time.Since(begin)
		}
	}
	b.t.Fatalf("%s does not answer; the worker said %q", who, worker.Log())
	return 0
}

// A process without any capability works with a lease that is handed to it. Killed, it leaves the datagrams
// to the kernel's socket: at once where it was the last to have the sockets.
func TestWorkerIsKilled(t *testing.T) {
	b := newBed(t, kernel.ModeNative)
	b.listen()
	l := b.prepared(64)
	worker := b.hand(l)
	must(t, l.Serve())
	b.until("xsk", worker)
	for i := range 20 {
		if who, err := b.ask(b.addresses[i%2]); err != nil || who != "xsk" {
			t.Fatalf("%q answered: %v; the worker said %q", who, err, worker.Log())
		}
	}
	if sum := b.conserved(l); sum.Matched < 20 || sum.PassedNoSocket != 0 {
		t.Errorf("%+v", sum)
	}
	must(t, l.Disown())
	if who, err := b.ask(b.addresses[0]); err != nil || who != "xsk" {
		t.Errorf("without the process that opened the sockets %q answered: %v", who, err)
	}
	must(t, worker.End(syscall.SIGKILL, 5*time.Second))
	t.Logf("the kernel's socket answered %s after the end of the worker", b.until("kernel", worker))
	passed := uint64(0)
	for queue := range queues {
		c, err := l.Counts(queue)
		must(t, err)
		passed += c.PassedNoSocket
	}
	if passed == 0 {
		t.Error("no datagram was counted as passed for want of a socket")
	}
}

// Where this side keeps the sockets, it pauses the lease when the worker ends; what was in the rings is
// still accounted for.
func TestWorkerIsKilledAndWatched(t *testing.T) {
	b := newBed(t, kernel.ModeNative)
	b.listen()
	l := b.prepared(64)
	worker := b.hand(l)
	must(t, l.Serve())
	b.until("xsk", worker)
	must(t, worker.End(syscall.SIGKILL, 5*time.Second))
	b.flood(32) // into rings that nobody reads
	must(t, l.Pause())
	b.until("kernel", worker)
	if sum := b.conserved(l); sum.Waiting == 0 || sum.Taken == 0 {
		t.Errorf("%+v", sum)
	}
}

func pair(t *testing.T) (ours, theirs int) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(p[0]); _ = unix.Close(p[1]) })
	return p[0], p[1]
}

// openFiles counts this process's descriptors.
func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(entries)
}

// What is handed over wrongly is refused, and its files are closed.
func TestBadHandsAreRefused(t *testing.T) {
	plan, err := xsk.Plan(64, 2048, false)
	must(t, err)
	layout := func(l xsk.Layout) string {
		return fmt.Sprintf(`{"layouts":[{"frame_size":%d,"receive_frames":%d,"receive_ring":%d,"fill_ring":%d,"completion_ring":%d}]}`,
			l.FrameSize, l.ReceiveFrames, l.ReceiveRing, l.FillRing, l.CompletionRing)
	}
	small := plan
	small.ReceiveRing = 63
	for name, c := range map[string]struct {
		text  string
		files int
		want  string
	}{
		"no message":       {"", 0, "has closed the socket"},
		"not JSON":         {"hello", 2, "read the grant"},
		"no queues":        {"{}", 1, "it has 0 queues"},
		"too few files":    {layout(plan), 1, "there are 1 files, and 2 are needed"},
		"too many files":   {layout(plan), 5, "there are 5 files"},
		"a bad ring":       {layout(small), 2, "power of two"},
		"not a socket":     {layout(plan), 2, "ask where the rings are"},
		"a long message":   {layout(plan) + strings.Repeat(" ", grantBytesMax), 2, "too long"},
		"too many queues":  {`{"layouts":[` + strings.Repeat("{},", 64) + `{}]}`, 2, "it has 65 queues"},
		"files of no kind": {layout(plan), 0, "there are 0 files"},
	} {
		t.Run(name, func(t *testing.T) {
			ours, theirs := pair(t)
			before := openFiles(t)
			var files []int
			if c.files > 0 {
				memory, err := xsk.NewMemory(plan.Size())
				must(t, err)
				files = append(files, memory.FD)
				defer func() { must(t, memory.Close()) }()
				before++
			}
			for len(files) < c.files {
				files = append(files, theirs)
			}
			if c.text == "" {
				must(t, unix.Shutdown(ours, unix.SHUT_WR))
			} else {
				must(t, unix.Sendmsg(ours, []byte(c.text), unix.UnixRights(files...), nil, 0))
			}
			if _, _, err := Take(theirs); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v; want %q", err, c.want)
			}
			if after := openFiles(t); after != before {
				t.Errorf("%d files are open, %d were before", after, before)
			}
		})
	}
}

// FuzzGrant: a grant that another process has written is read or refused.
func FuzzGrant(f *testing.F) {
	f.Add([]byte(`{"mode":"copy","serves":["192.0.2.10:5000"],"layouts":[{"frame_size":2048,"receive_frames":128,"receive_ring":64,"fill_ring":256,"completion_ring":64}]}`))
	f.Add([]byte(`{"layouts":[{}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		grant, err := readGrant(text)
		if err != nil {
			return
		}
		memory, err := xsk.NewMemory(4096)
		must(t, err)
		fd, err := unix.FcntlInt(uintptr(memory.FD), unix.F_DUPFD_CLOEXEC, 0)
		must(t, err)
		must(t, memory.Close())
		files := []int{fd}
		for range grant.Layouts {
			null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
			must(t, err)
			files = append(files, null)
		}
		if _, err := xsk.AdoptSet(grant.Layouts, files); err == nil {
			t.Fatal("a file that is no socket was adopted")
		}
	})
}
