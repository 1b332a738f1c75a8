package net

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/control"
)

// http returns a client for the daemon's API.
func (b *bed) http() *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", b.socket)
		},
	}}
}

// override runs `shunt override …`, which must succeed.
func (b *bed) override(t *testing.T, args ...string) string {
	t.Helper()
	code, out := b.shunt(append(append([]string{"override"}, args...), "--socket", b.socket)...)
	if code != 0 {
		t.Fatalf("shunt override %s: exit code %d\n%s", strings.Join(args, " "), code, out)
	}
	return out
}

// set runs `shunt backend …`, which must succeed.
func (b *bed) set(t *testing.T, args ...string) string {
	t.Helper()
	code, out := b.backend(args[0], args[1:]...)
	if code != 0 {
		t.Fatalf("shunt backend %s: exit code %d\n%s", strings.Join(args, " "), code, out)
	}
	return out
}

// TestOverrides: weight and health set by operators hold in every service, over restart and
// reload, and are shown with their author, until they are cleared or the backend leaves the
// file.
func TestOverrides(t *testing.T) {
	b, file, addresses := drainBed(t, "nat")
	vip, b1, b2 := directVIPs(0)[0], addresses[0].String(), addresses[1].String()
	b.set(t, "weight", "b1", "0")
	if out := b.set(t, "health", "b2", "down"); !strings.Contains(out, b2+": down from now on") {
		t.Errorf("shunt backend health says\n%s", out)
	}
	check := func(when string) {
		t.Helper()
		if seen := b.fresh(t, vip); seen["b1"]+seen["b2"] != 0 || len(seen) != 1 {
			t.Errorf("%s: new flows were answered by %v", when, seen)
		}
		l := b.list(t)
		for address, is := range map[string][2]string{b1: {"weight", "draining"}, b2: {"health", "down"}} {
			if o, kind := l[address].Overrides, is[0]; l[address].State != is[1] || len(o) != 1 || o[0].Kind != kind || o[0].By == "" || o[0].Client != "shunt" || o[0].UID != 0 {
				t.Errorf("%s: %s is %+v", when, address, l[address])
			}
		}
	}
	check("overridden")
	if code, out := b.backend("drain", "nobody"); code != 1 || !strings.Contains(out, `look for backend "nobody": no backend has this name or address`) {
		t.Errorf("an unknown backend: exit code %d\n%s", code, out)
	}
	answer, err := b.http().Post("http://shunt/shunt.v1.ControlService/DrainBackend", "application/json", strings.NewReader(`{"backend": "nobody"}`))
	if err != nil {
		t.Fatal(err)
	}
	if answer.Body.Close(); answer.StatusCode != http.StatusNotFound {
		t.Errorf("the API answers %s for an unknown backend", answer.Status)
	}
	b.kill()
	b.start()
	check("after kill -9 and a start")
	b.reload(file(line(addresses[2].Next())))
	b.reload(file())
	check("after reloads")
	var listed []struct {
		Backend, Kind, Health, By string
		Weight                    *int
	}
	if err := json.Unmarshal([]byte(b.override(t, "list", "-o", "json")), &listed); err != nil || len(listed) != 2 ||
		listed[0].Weight == nil || *listed[0].Weight != 0 || listed[1].Health != "down" || listed[1].Weight != nil {
		t.Errorf("shunt override list -o json: %+v, %v", listed, err)
	}
	if text := b.override(t, "list"); !strings.Contains(text, "with shunt") || !strings.Contains(text, "down") {
		t.Errorf("shunt override list:\n%s", text)
	}
	if out := b.set(t, "weight", "b1", "5"); !strings.Contains(out, "was 0, set by") {
		t.Errorf("another weight does not say what it replaces:\n%s", out)
	}
	if seen := b.fresh(t, vip); seen["b1"] == 0 || seen["b2"] != 0 {
		t.Errorf("with weight 5: %v", seen)
	}
	b.set(t, "health", "b2", "auto")
	b.set(t, "drain", "b1", "--deadline", "1h")
	if out := b.set(t, "drain", "b1"); !strings.Contains(out, "was until ") {
		t.Errorf("a second drain does not say that the deadline is gone:\n%s", out)
	}
	b.override(t, "clear", "b1", "weight")
	if seen := b.fresh(t, vip); seen["b1"] != 0 || seen["b2"] == 0 {
		t.Errorf("drained, and cleared another: %v", seen)
	}
	b.override(t, "clear", "--all")
	if seen := b.fresh(t, vip); seen["b1"] == 0 || seen["b2"] == 0 {
		t.Errorf("with all cleared: %v", seen)
	}
	if text := b.override(t, "list"); !strings.Contains(text, "There are no overrides") {
		t.Errorf("shunt override list:\n%s", text)
	}
	b.set(t, "weight", "b2", "9")
	b.reload(strings.ReplaceAll(file(), fmt.Sprintf("      - {%s, name: b2}\n", line(addresses[1])), ""))
	b.reload(file())
	if l := b.list(t)[b2]; len(l.Overrides) != 0 {
		t.Errorf("a backend that left the file and came back: %+v", l)
	}
	b.readOnly(t)
}

// readOnly uses the socket for reading, by the API and by the command line.
func (b *bed) readOnly(t *testing.T) {
	t.Helper()
	read := control.ReadSocket(b.socket)
	if code, out := b.shunt("status", "--instance", b.instance, "--socket", read); code != 0 || !strings.Contains(out, "The daemon is process") {
		t.Errorf("shunt status at the socket for reading: exit code %d\n%s", code, out)
	}
	if code, out := b.shunt("reload", "--socket", read); code != 1 || !strings.Contains(out, "go to "+b.socket) {
		t.Errorf("shunt reload at the socket for reading: exit code %d\n%s", code, out)
	}
}

// TestOverridesOnBadDisk: a full disk, a disk that turns read-only and a damaged file each
// have a condition, and an operator's commands are still in force.
func TestOverridesOnBadDisk(t *testing.T) {
	b, _, addresses := drainBed(t, "nat")
	if err := b.daemon.end(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(disk, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("shunt-test", disk, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatalf("mount a small disk: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(disk, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount the small disk: %v", err)
		}
	})
	b.env = []string{"STATE_DIRECTORY=" + disk}
	b.start()
	vip, b1 := directVIPs(0)[0], addresses[0].String()
	unsaved := func(want bool) {
		t.Helper()
		eventually(t, 10*time.Second, fmt.Sprintf("overrides_unsaved: %v", want), func() error {
			if text := b.status().condition("overrides_unsaved"); (text != "") != want {
				return fmt.Errorf("the condition is %q", text)
			}
			return nil
		})
	}

	ballast := filepath.Join(disk, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 64<<10), 0o600); err != nil { // every block
		t.Fatal(err)
	}
	if out := b.set(t, "weight", "b1", "0"); !strings.Contains(out, "would not survive a restart") || !strings.Contains(out, "no space left") {
		t.Errorf("a weight on a full disk:\n%s", out)
	}
	unsaved(true)
	if seen := b.fresh(t, vip); seen["b1"] != 0 {
		t.Errorf("on a full disk: %v", seen)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	unsaved(false)
	b.kill()
	b.start()
	if o := b.list(t)[b1].Overrides; len(o) != 1 {
		t.Errorf("after there was room, and a restart: %+v", o)
	}

	remount := func(flags uintptr) {
		t.Helper()
		if err := syscall.Mount("shunt-test", disk, "tmpfs", syscall.MS_REMOUNT|flags, "size=64k"); err != nil {
			t.Fatal(err)
		}
	}
	remount(syscall.MS_RDONLY)
	b.set(t, "drain", "b2")
	unsaved(true)
	if seen := b.fresh(t, vip); seen["b1"]+seen["b2"] != 0 {
		t.Errorf("on a read-only disk: %v", seen)
	}
	b.kill() // before it could be saved: the file has the earlier state
	b.start()
	if l := b.list(t); len(l[b1].Overrides) != 1 || len(l[addresses[1].String()].Overrides) != 0 {
		t.Errorf("after a restart on a read-only disk: %+v", l)
	}
	b.kill()
	remount(0)

	b.damaged(t, filepath.Join(disk, b.instance+".overrides.json"), addresses[0].String())
}

// damaged changes one number in the file of overrides, which has weight 0 for b1.
func (b *bed) damaged(t *testing.T, path, b1 string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(strings.Replace(string(text), `"weight": 0`, `"weight": 1`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	b.start()
	if text := b.status().condition("overrides_lost"); !strings.Contains(text, path+".damaged") || !strings.Contains(text, "checksum") {
		t.Errorf("the condition of a damaged file is %q", text)
	}
	if l := b.list(t)[b1]; len(l.Overrides) != 0 {
		t.Errorf("a damaged override is in force: %+v", l)
	}
	if seen := b.fresh(t, directVIPs(0)[0]); len(seen) != 3 {
		t.Errorf("with a damaged file: %v", seen)
	}
	b.set(t, "weight", "b1", "7")
	b.kill()
	b.start()
	if text := b.status().condition("overrides_lost"); !strings.Contains(text, path+".damaged") {
		t.Errorf("the condition is gone while the file is there: %q", text)
	}
	if o := b.list(t)[b1].Overrides; len(o) != 1 {
		t.Errorf("an override after a damaged file did not last: %+v", o)
	}
	if err := os.Remove(path + ".damaged"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "the end of overrides_lost", func() error {
		if text := b.status().condition("overrides_lost"); text != "" {
			return fmt.Errorf("the condition is %q", text)
		}
		return nil
	})
}

// TestSilentClients: a thousand clients that send nothing do not keep the daemon from its
// work, nor others from using it.
func TestSilentClients(t *testing.T) {
	b, file, addresses := drainBed(t, "nat")
	for range 1000 {
		c, err := net.Dial("unix", b.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = c.Write([]byte("P"))
	}
	b.reload(file(line(addresses[2].Next())))
	b.reload(file())
	eventually(t, 10*time.Second, "a fresh heartbeat", func() error {
		if code, out := b.shunt("status", "-o", "json", "--instance", b.instance, "--socket", b.socket); code != 0 || !strings.Contains(out, `"pid"`) {
			return fmt.Errorf("exit code %d\n%s", code, out)
		}
		return nil
	})
	if seen := b.fresh(t, directVIPs(0)[0]); len(seen) < 3 {
		t.Errorf("new flows were answered by %v", seen)
	}
}
