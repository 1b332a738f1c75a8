package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/settings"
)

// TestDenied: a user who may not ask gets the truth about the socket, and the remedy.
func TestDenied(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("to be another user needs root")
	}
	const stranger, changers = 54002, 54004
	folder, err := os.MkdirTemp("", "shunt-denied")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	serve := func(name, group string) string {
		path := filepath.Join(folder, name)
		s := &Server{API: settings.API{Socket: path, Group: group}, Handler: &fake{}, Log: slog.New(slog.DiscardHandler)}
		if err := s.Listen(ctx); err != nil {
			t.Fatal(err)
		}
		s.Serve()
		return path
	}
	closed := filepath.Join(folder, "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(folder, "left.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: left, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	if err := errors.Join(dead.Close(), os.Chmod(left, 0o600)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		serve("root.sock", ""):                    "because only root may use the socket; run the command with sudo, or let root name one of your groups in the configuration: `api: {group: …}`",
		serve("group.sock", fmt.Sprint(changers)): fmt.Sprintf("because only root and the group %d may use the socket; run the command with sudo, or let root add you to that group", changers),
		left:                          "and no process in this network namespace listens there: the daemon was killed, or runs in another network namespace; run the command with sudo",
		filepath.Join(closed, "sock"): "because this user may not look into the socket's folder; run the command with sudo",
	} {
		as(t, stranger, stranger, func() {
			// Asked from this goroutine, because another thread is root's.
			_, err := os.OpenFile(path, os.O_RDWR, 0)
			if !errors.Is(err, os.ErrPermission) {
				t.Errorf("%s is open to anybody: %v", path, err)
			}
			denied := Denied(path, "group")
			if text := "ask the daemon at " + path + ": permission denied, " + want; denied.Error() != text || !errors.Is(denied, ErrDenied) {
				t.Errorf("it says %q, want %q", denied, text)
			}
		})
	}
	if text := Denied(ReadSocket(filepath.Join(folder, "root.sock")), "read_group").Error(); !strings.Contains(text, "`api: {read_group: …}`") {
		t.Errorf("of the socket for reading it says %q", text)
	}
}
