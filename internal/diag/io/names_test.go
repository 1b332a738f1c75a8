package io

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/event"
)

const mountinfo = `22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 254:0 /srv/data /mnt/with\040blank rw - ext4 /dev/vda rw
31 22 8:1 /sub /sub rw - ext4 /dev/sda1 rw
broken line
32 22 x:1 / /broken rw - ext4 /dev/sda1 rw
`

func TestPathsAreWhereTheyAreMounted(t *testing.T) {
	mounts := parseMounts(mountinfo)
	if len(mounts) != 3 {
		t.Fatalf("%+v", mounts)
	}
	for _, test := range []struct {
		device     uint32
		path, want string
	}{
		{254 << 20, "/etc/passwd", "/etc/passwd"},
		{254 << 20, "/srv/data/x", "/srv/data/x"}, // rather by the larger mount
		{8<<20 | 1, "/sub/a/b", "/sub/a/b"},
		{8<<20 | 1, "/sub", "/sub"},
		{8<<20 | 1, "/subway", ""},
		{9 << 20, "/a", ""},
	} {
		if got, ok := mountedPath(mounts, test.device, test.path); got != test.want || ok != (test.want != "") {
			t.Errorf("%d %s: got %q, want %q", test.device, test.path, got, test.want)
		}
	}
	if got, _ := mountedPath(mounts[1:], 254<<20, "/srv/data/x"); got != "/mnt/with blank/x" {
		t.Errorf("by the bind mount: %q", got)
	}
}

func encodePath(t testing.TB, f file, links uint32, cut uint16, names string) []byte {
	t.Helper()
	p := ioIoPath{File: f, Links: links, NamesSize: uint16(len(names)), IsCut: cut}
	for i := range names {
		p.Names[i] = int8(names[i])
	}
	var b bytes.Buffer
	if err := binary.Write(&b, binary.NativeEndian, p); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestNamesOfFiles(t *testing.T) {
	for _, test := range []struct {
		links uint32
		cut   uint16
		names string
		want  string
	}{
		{1, 0, "file\x00folder\x00", "9:0:/folder/file"}, // mounted nowhere
		{0, 0, "file\x00folder\x00", "9:0:/folder/file (deleted)"},
		{1, 1, "file\x00folder\x00", "/.../folder/file"},
		{1, 0, "", "-"},
	} {
		n := newNames()
		f := file{Inode: 7, Device: 9 << 20}
		n.learn(event.Event{Header: event.Header{Sensor: 1}, Payload: encodePath(t, f, test.links, test.cut, test.names)})
		if got := n.path(f, 1, 1); got != test.want {
			t.Errorf("%q: got %q, want %q", test.names, got, test.want)
		}
	}
	n := newNames()
	for f, want := range map[file]string{{}: "-", {Device: 9 << 20}: "/dev/9:0", {Device: 9 << 20, Inode: 8}: "-"} {
		if got := n.path(f, 1, 1); got != want {
			t.Errorf("%+v: got %q, want %q", f, got, want)
		}
	}
}

func FuzzDecodePath(f *testing.F) {
	f.Add(encodePath(f, file{Inode: 1}, 1, 0, "a\x00b\x00"))
	f.Add([]byte("short"))
	f.Add(append(encodePath(f, file{}, 0, 1, strings.Repeat("x", 2304)), 1))
	f.Fuzz(func(t *testing.T, payload []byte) {
		n := newNames()
		n.learn(event.Event{Header: event.Header{Sensor: 1}, Payload: payload})
		n.learn(event.Event{Header: event.Header{Sensor: 2}, Payload: payload})
		if int(n.broken)+len(n.files) != 2 {
			t.Errorf("%d broken, %d learnt", n.broken, len(n.files))
		}
	})
}

func TestContainers(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	n := newNames()
	n.cgroups[5] = "/system.slice/docker-" + id + ".scope"
	n.cgroups[6] = "/user.slice"
	if got := n.container(5, 0); got != id {
		t.Errorf("got %q", got)
	}
	if got := n.container(6, 0); got != "" { // no process has the number 0
		t.Errorf("got %q", got)
	}
}
