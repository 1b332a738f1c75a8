package proto

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/udp/xsk"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func grant(t testing.TB) *Grant {
	t.Helper()
	plan, err := xsk.Plan(64, 2048, true)
	must(t, err)
	second := plan
	second.Queue, second.Offset = 1, plan.Size()
	g, err := NewGrant(7, []xsk.Layout{plan, second}, []netip.AddrPort{netip.MustParseAddrPort("192.0.2.10:5000"), netip.MustParseAddrPort("[2001:db8::10]:5001")}, []int{3}, WaitAdaptive)
	must(t, err)
	return g
}

// The sizes are those of the protocol's page: programs in other languages rely on them.
func TestSizes(t *testing.T) {
	want := map[Type]int{
		TypeHello: 24, TypeWelcome: 24, TypeRequest: 80, TypeGrant: 3488, TypeReady: 16,
		TypeServing: 280, TypeRenew: 24, TypeRenewed: 1048, TypeEnd: 528, TypeReport: 2072, TypeResume: 32,
	}
	for kind, make := range bodies {
		b := make()
		if b.kind() != kind {
			t.Errorf("type %d makes one of type %d", kind, b.kind())
		}
		if got := headerSize + binary.Size(b); got != want[kind] || got > SizeMax {
			t.Errorf("type %d has %d bytes; want %d", kind, got, want[kind])
		}
	}
}

func TestGrantHasAllOfItsLayouts(t *testing.T) {
	g := grant(t)
	b, err := Decode(Encode(g), 3)
	must(t, err)
	got := b.(*Grant)
	if !reflect.DeepEqual(got, g) || len(got.Layouts()) != 2 || got.Layouts()[1].Offset != got.Layouts()[0].Size() || got.Layouts()[1].Queue != 1 ||
		got.Queues[1].CPU != 3 || got.Queues[2].CPU != 0 {
		t.Errorf("%+v", got.Layouts())
	}
	if s := got.Serves(); len(s) != 2 || s[0].String() != "192.0.2.10:5000" || s[1].String() != "[2001:db8::10]:5001" {
		t.Errorf("%v", s)
	}
	for flags, want := range map[uint32]Wait{FlagReport: "", FlagReport | FlagSpin: WaitSpin, FlagAdaptive: WaitAdaptive, FlagSleep | FlagStamped: WaitSleep, FlagSpin | FlagSleep: "", 64: ""} {
		if got := (&Grant{Flags: flags}).Wait(); got != want {
			t.Errorf("flags %d advise %q, want %q", flags, got, want)
		}
	}
	if got.Wait() != WaitAdaptive || got.Flags&FlagReport == 0 {
		t.Errorf("flags %d advise %q", got.Flags, got.Wait())
	}
	if _, err := NewGrant(1, nil, nil, nil, ""); err == nil {
		t.Error("a grant without queues was made")
	}
}

func TestMalformedMessagesAreRefused(t *testing.T) {
	hello := Encode(&Hello{Magic: Magic, VersionMin: 1, VersionMax: 1})
	edit := func(message []byte, at int, b byte) []byte {
		message = bytes.Clone(message)
		message[at] = b
		return message
	}
	big := grant(t)
	big.QueueCount = QueuesMax + 1
	for name, c := range map[string]struct {
		message []byte
		files   int
		want    string
	}{
		"empty":                  {nil, 0, "0 bytes"},
		"half a header":          {hello[:4], 0, "4 bytes"},
		"short":                  {hello[:len(hello)-1], 0, "has 24 bytes; this message has 23"},
		"long":                   {append(bytes.Clone(hello), 0), 0, "this message has 25"},
		"another size":           {edit(hello, 4, 25), 0, "its header says 25"},
		"no such type":           {edit(hello, 0, 99), 0, "no type 99"},
		"files with a hello":     {hello, 1, "does not come with 1 files"},
		"another version":        {edit(Encode(&Ready{}), 2, 2), 0, "version is 2"},
		"too few files":          {Encode(grant(t)), 2, "does not come with 2 files"},
		"too many files":         {Encode(grant(t)), 4, "does not come with 4 files"},
		"more queues than fit":   {Encode(big), 66, "65 queues"},
		"a grant without queues": {Encode(&Grant{}), 1, "0 queues"},
		"resuming no queues":     {Encode(&Resume{}), 1, "0 queues"},
		"resuming more queues":   {Encode(&Resume{QueueCount: QueuesMax + 1}), 2 + QueuesMax, "65 queues"},
		"resuming without files": {Encode(&Resume{QueueCount: 1}), 0, "does not come with 0 files"},
	} {
		if _, err := Decode(c.message, c.files); !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", name, err, c.want)
		}
	}
	if _, err := Decode(edit(hello, 2, 9), 0); err != nil {
		t.Errorf("a hello of another version must be readable: %v", err)
	}
}

func TestTextIsCutAtACharacter(t *testing.T) {
	field := []byte("xxxxxxxx")
	Put(field, "größe: ä")
	if got := Text(field); got != "größe" {
		t.Errorf("%q", got)
	}
	Put(field, "\xff\xfea")
	if got := Text(field); got != "a" {
		t.Errorf("%q", got)
	}
	Put(field, "ab")
	if !bytes.Equal(field, []byte("ab\x00\x00\x00\x00\x00\x00")) {
		t.Errorf("%q: the rest is not zero", field)
	}
}

// pair is both ends of a connection, the second with credentials.
func pair(t *testing.T) (*Conn, *Conn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	must(t, err)
	a, err := Dial(context.Background(), path)
	must(t, err)
	c, err := l.AcceptUnix()
	must(t, err)
	must(t, l.Close())
	b := NewConn(c)
	t.Cleanup(func() { must(t, a.Close()); must(t, b.Close()) })
	raw, err := c.SyscallConn()
	must(t, err)
	must(t, raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) }))
	must(t, err)
	return a, b
}

func TestMessagesCarryFilesAndSenders(t *testing.T) {
	a, b := pair(t)
	null, err := os.Open(os.DevNull)
	must(t, err)
	defer null.Close() //nolint:errcheck // only read
	fd := int(null.Fd())
	must(t, a.Send(grant(t), time.Second, fd, fd, fd))
	got, files, from, err := b.Receive(time.Now().Add(5 * time.Second))
	must(t, err)
	if from.PID != os.Getpid() || from.UID != uint32(os.Getuid()) || len(files) != 3 || got.(*Grant).Lease != 7 {
		t.Errorf("from %+v, %d files", from, len(files))
	}
	for _, fd := range files {
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("file %d: flags %#x, %v", fd, flags, err)
		}
		must(t, unix.Close(fd))
	}
	// Files that nobody asked for are closed.
	before := openFiles(t)
	must(t, a.Send(&Ready{}, time.Second, fd, fd))
	if _, _, _, err := b.Receive(time.Now().Add(5 * time.Second)); !errors.Is(err, ErrMalformed) {
		t.Errorf("files with Ready: %v", err)
	}
	if after := openFiles(t); after != before {
		t.Errorf("%d files are open, %d were before", after, before)
	}
	if _, err := a.unix.Write(make([]byte, SizeMax+1)); err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := b.Receive(time.Now().Add(5 * time.Second)); !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), "longer") {
		t.Errorf("a long message: %v", err)
	}
	must(t, a.Close())
	if _, _, _, err := b.Receive(time.Now().Add(5 * time.Second)); !errors.Is(err, io.EOF) {
		t.Errorf("after Close: %v", err)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(entries)
}

// FuzzDecode: a message that can be read is written again as it was; and no text does harm.
func FuzzDecode(f *testing.F) {
	for _, make := range bodies {
		f.Add(Encode(make()), 0)
	}
	f.Add(Encode(grant(f)), 3)
	f.Fuzz(func(t *testing.T, message []byte, files int) {
		b, err := Decode(message, files)
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Fatal(err)
			}
			return
		}
		again, err := Decode(Encode(b), files)
		must(t, err)
		if !reflect.DeepEqual(again, b) {
			t.Fatalf("%+v became %+v", b, again)
		}
		if g, ok := b.(*Grant); ok && (len(g.Layouts()) != files-1 || len(g.Serves()) > AddressesMax) {
			t.Fatalf("%d layouts, %d files", len(g.Layouts()), files)
		}
		if e, ok := b.(*End); ok {
			Put(e.Text[:], Text(e.Text[:]))
			_ = e.Code.String()
		}
	})
}
