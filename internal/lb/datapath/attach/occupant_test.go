package attach

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/decap"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/test/stranger"
)

// idOf returns a program's number in the kernel, and its tag.
func idOf(t *testing.T, p *ebpf.Program) (id uint32, tag string) {
	t.Helper()
	info, err := p.Info()
	must(t, err)
	number, _ := info.ID()
	return uint32(number), info.Tag
}

// holdVariable makes a process of this test binary only wait.
const holdVariable = "SHUNT_TEST_HOLDS"

// TestWaits runs in such a process; otherwise it does nothing.
func TestWaits(*testing.T) {
	if os.Getenv(holdVariable) != "" {
		_, _ = io.Copy(io.Discard, os.Stdin)
	}
}

// holding has another process keep a file of the kernel's open, and returns that process as messages name it.
func holding(t *testing.T, fd int) string {
	t.Helper()
	copied, err := unix.Dup(fd)
	must(t, err)
	self, err := os.Executable()
	must(t, err)
	c := exec.Command(self, "-test.run=^TestWaits$")
	c.Env = append(os.Environ(), holdVariable+"=1")
	input, err := c.StdinPipe()
	must(t, err)
	c.ExtraFiles = []*os.File{os.NewFile(uintptr(copied), "bpf")}
	must(t, c.Start())
	must(t, c.ExtraFiles[0].Close())
	t.Cleanup(func() { _ = input.Close(); _ = c.Wait() })
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", c.Process.Pid))
	must(t, err)
	return fmt.Sprintf("process %d (%s)", c.Process.Pid, strings.TrimSpace(string(name)))
}

var quoted = regexp.MustCompile("`([^`]*)`")

// obey runs the command that a message names; it returns false if this machine does not have the command.
func obey(t *testing.T, message, program string) bool {
	t.Helper()
	_, err := exec.LookPath(program)
	if out, _ := exec.Command("ip", "-V").CombinedOutput(); program == "ip" && !strings.Contains(string(out), "iproute2") {
		err = exec.ErrNotFound // busybox has a command of this name, which knows nothing of XDP
	}
	if err != nil {
		t.Logf("%s is not here, so whether the command works is not tried: %s", program, message)
		return false
	}
	for _, m := range quoted.FindAllStringSubmatch(message, -1) {
		words := strings.Fields(m[1])
		if words[0] != program {
			continue
		}
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s, as the message says: %v\n%s", m[1], err, out)
		}
		return true
	}
	t.Fatalf("no command of %s in: %s", program, message)
	return false
}

// requireOccupied expects the refusal, with all these words.
func requireOccupied(t *testing.T, err error, words ...string) *kernel.OccupiedError {
	t.Helper()
	var taken *kernel.OccupiedError
	if !errors.As(err, &taken) {
		t.Fatalf("got %v, want that the interface is occupied", err)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("the message lacks %q:\n%v", word, err)
		}
	}
	return taken
}

func TestSomebodyElsesProgramIsNamed(t *testing.T) {
	for _, c := range []struct {
		over  string
		mode  kernel.Mode
		flags link.XDPAttachFlags
		nl    uint32
	}{
		{"netlink", kernel.ModeNative, link.XDPDriverMode, nl.XDP_ATTACHED_DRV},
		{"netlink", kernel.ModeGeneric, link.XDPGenericMode, nl.XDP_ATTACHED_SKB},
		{"bpf_link", kernel.ModeNative, link.XDPDriverMode, nl.XDP_ATTACHED_DRV},
		{"bpf_link", kernel.ModeGeneric, link.XDPGenericMode, nl.XDP_ATTACHED_SKB},
	} {
		t.Run(fmt.Sprintf("%s/%s", c.over, c.mode), func(t *testing.T) {
			inNamespace(t)
			d := mustOpen(t, testOptions(t))
			other := stranger.Pass(t, "not_shunt")
			ifindex := device(t, "shunt-a").Attrs().Index
			id, tag := idOf(t, other)
			words := []string{`"not_shunt"`, fmt.Sprintf("program %d", id), tag, "in " + string(c.mode) + " mode", "loaded by uid 0",
				"`attach: generic` does not help", "shunt chain set --interface shunt-a"}
			held, tool := other.FD(), "ip"
			if c.over == "bpf_link" {
				l, err := link.AttachXDP(link.XDPOptions{Program: other, Interface: ifindex, Flags: c.flags})
				must(t, err)
				defer l.Close()
				info, err := l.Info()
				must(t, err)
				held, tool = l.(interface{ FD() int }).FD(), "bpftool"
				words = append(words, fmt.Sprintf("bpf_link %d", info.ID))
			} else {
				must(t, netlink.LinkSetXdpFdWithFlags(device(t, "shunt-a"), other.FD(), int(c.flags)))
				words = append(words, "over netlink")
			}
			words = append(words, holding(t, held))
			var taken *kernel.OccupiedError
			for _, mode := range []model.Attach{model.AttachAuto, model.AttachNative, model.AttachGeneric} {
				_, err := d.Attach("shunt-a", mode)
				taken = requireOccupied(t, err, words...)
			}
			requireMode(t, "shunt-a", c.nl)
			if programID(t, "shunt-a") != id {
				t.Error("the other program is no longer attached")
			}
			if age := time.Since(taken.Occupant.Loaded); age < -time.Second || age > time.Minute {
				t.Errorf("it was loaded %s ago, says the kernel", age)
			}
			if taken.Freed() {
				t.Error("the interface is said to be free, and has the program")
			}
			if !obey(t, taken.Occupant.TakeOff(), tool) {
				return
			}
			requireMode(t, "shunt-a", nl.XDP_ATTACHED_NONE)
			if !taken.Freed() {
				t.Error("the program has gone, and the interface is not said to be free")
			}
			_, err := d.Attach("shunt-a", model.AttachNative)
			must(t, err)
		})
	}
}

// The kernel runs either a native or a generic program; the message's advice about `attach: generic`
// rests on that.
func TestNativeAndGenericExcludeEachOther(t *testing.T) {
	inNamespace(t)
	other := stranger.Pass(t, "other")
	for first, second := range map[link.XDPAttachFlags]link.XDPAttachFlags{
		link.XDPDriverMode: link.XDPGenericMode, link.XDPGenericMode: link.XDPDriverMode,
	} {
		dev := device(t, "shunt-a")
		must(t, netlink.LinkSetXdpFdWithFlags(dev, other.FD(), int(first)))
		if err := netlink.LinkSetXdpFdWithFlags(dev, other.FD(), int(second)); !errors.Is(err, syscall.EEXIST) {
			t.Errorf("both modes at once: %v, want EEXIST", err)
		}
		must(t, netlink.LinkSetXdpFdWithFlags(dev, -1, int(first)))
	}
}

func TestWhatKeepsAProgramIsFound(t *testing.T) {
	inNamespace(t)
	opts, another := testOptions(t), testOptions(t)
	d := mustOpen(t, opts)

	folder := filepath.Join(kernel.DefaultPinRoot, opts.Instance+"-pins")
	must(t, os.Mkdir(folder, 0o700))
	defer os.RemoveAll(folder)
	pin := filepath.Join(folder, "a")
	l, err := link.AttachXDP(link.XDPOptions{Program: stranger.Pass(t, "pinned"), Interface: device(t, "shunt-a").Attrs().Index, Flags: link.XDPDriverMode})
	must(t, err)
	must(t, l.Pin(pin))
	must(t, l.Close())
	_, err = d.Attach("shunt-a", model.AttachAuto)
	taken := requireOccupied(t, err, "kept by the file "+pin)
	if !obey(t, taken.Occupant.TakeOff(), "rm") {
		must(t, os.Remove(pin))
	}
	// The kernel frees an inode, and with it the link, some time after the file has gone.
	for end := time.Now().Add(20 * time.Second); programID(t, "shunt-a") != 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	requireMode(t, "shunt-a", nl.XDP_ATTACHED_NONE)

	other := mustOpen(t, another)
	_, err = other.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	_, err = d.Attach("shunt-a", model.AttachAuto)
	requireOccupied(t, err, "`shunt detach --instance "+another.Instance+"`", `"sh_xdp"`)
	must(t, other.Detach("shunt-a"))

	decap, err := decap.Attach(decap.Options{Name: opts.Instance, Interface: "shunt-a", Mode: model.AttachAuto, Log: quiet()})
	must(t, err)
	_, err = d.Attach("shunt-a", model.AttachAuto)
	requireOccupied(t, err, "stop `shunt decap`", `"sh_decap"`)
	must(t, decap.Detach())

	// A program on a bridge keeps others off its ports.
	must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "shunt-br"}}))
	must(t, netlink.LinkSetMaster(device(t, "shunt-a"), device(t, "shunt-br")))
	must(t, netlink.LinkSetXdpFdWithFlags(device(t, "shunt-br"), stranger.Pass(t, "on_bridge").FD(), nl.XDP_FLAGS_SKB_MODE))
	_, err = d.Attach("shunt-a", model.AttachAuto)
	requireOccupied(t, err, `"on_bridge"`, "on shunt-br", "`ip link set dev shunt-br xdpgeneric off`")
}

func TestNobodyOnTheInterface(t *testing.T) {
	inNamespace(t)
	if o, err := kernel.OccupantOf("shunt-a"); o != nil || err != nil {
		t.Errorf("an empty interface has %v, %v", o, err)
	}
	if _, err := kernel.OccupantOf("nothere"); err == nil || !strings.Contains(err.Error(), "nothere") {
		t.Errorf("an interface that does not exist: %v", err)
	}
}
