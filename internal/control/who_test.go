package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/settings"
	"golang.org/x/sys/unix"
)

// as runs on a thread that is another user's, and ends with it.
func as(t *testing.T, uid, gid int, do func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		for _, call := range [][4]uintptr{{unix.SYS_SETGROUPS}, {unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)},
			{unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)}} {
			if _, _, errno := unix.RawSyscall(call[0], call[1], call[2], call[3]); errno != 0 {
				done <- errno
				return
			}
		}
		do()
		done <- nil
	}()
	if err := <-done; err != nil {
		t.Fatalf("become uid %d: %v", uid, err)
	}
}

// TestWhoMay has a member of the reading group, and one of neither group.
func TestWhoMay(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("to be another user needs root")
	}
	const member, stranger, readers, changers = 54001, 54002, 54003, 54004
	folder, err := os.MkdirTemp("", "shunt-who")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "shunt.sock")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	f := &fake{}
	api := settings.API{Socket: path, Group: fmt.Sprint(changers), ReadGroup: fmt.Sprint(readers)}
	s := &Server{API: api, Handler: f, Log: slog.New(slog.DiscardHandler)}
	if err := s.Listen(ctx); err != nil {
		t.Fatal(err)
	}
	s.Serve()
	for _, c := range []struct {
		uid, gid     int
		change, read bool
	}{
		{member, readers, false, true},
		{member, changers, true, false},
		{stranger, stranger, false, false},
		{0, 0, true, true},
	} {
		for p, may := range map[string]bool{path: c.change, ReadSocket(path): c.read} {
			as(t, c.uid, c.gid, func() {
				conn, err := net.Dial("unix", p)
				if err == nil {
					conn.Close()
				}
				if may != (err == nil) || err != nil && !errors.Is(err, fs.ErrPermission) {
					t.Errorf("uid %d of group %d opens %s: %v, and may: %v", c.uid, c.gid, p, err, may)
				}
			})
		}
	}
	// The kernel identifies the caller: a member that claims to be somebody else is ignored.
	const body = `{"backend": "10.0.0.2", "weight": 1}`
	for _, uid := range []int{member, 0} {
		as(t, uid, changers, func() {
			conn, err := net.Dial("unix", path)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			fmt.Fprintf(conn, "POST /shunt.v1.ControlService/SetBackendWeight HTTP/1.1\r\nHost: shunt\r\nShunt-User: alice\r\nUser-Agent: ed\xff\xc2\x85%s\r\nContent-Length: %d\r\n\r\n%s",
				strings.Repeat("x", 100), len(body), body)
			response, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Error(err)
				return
			}
			defer response.Body.Close()
			if text, _ := io.ReadAll(response.Body); response.StatusCode != 200 {
				t.Errorf("%d %s", response.StatusCode, text)
			}
		})
	}
	if len(f.asked) != 2 {
		t.Fatalf("%d settings reached the daemon", len(f.asked))
	}
	if s := f.asked[0]; s.UID != member || s.By != fmt.Sprintf("uid %d", member) {
		t.Errorf("the member's setting is by %q, uid %d", s.By, s.UID)
	}
	if s := f.asked[1]; s.UID != 0 || s.By != "alice" || len(s.Client) > wordBytesMax || !strings.HasPrefix(s.Client, "edx") {
		t.Errorf("the setting of root on behalf of alice is by %q, uid %d, with %q", s.By, s.UID, s.Client)
	}
}
