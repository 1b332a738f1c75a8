package demo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/machine"
)

// guest is a virtual machine for the stage.
type guest struct {
	kernel      string // path of its image
	image       string // path of its files
	said        string // path of the kernel's output
	accelerator string // qemu's -accel
}

// boots are the paths of distributions' kernels, with a place for the release.
var boots = []struct{ image, config string }{
	{"/boot/vmlinuz-%s", "/boot/config-%s"},
	{"/lib/modules/%s/vmlinuz", "/lib/modules/%s/config"},
}

// newGuest returns a virtual machine with this kernel, or with one of this machine's. The error names the missing
// packages.
func newGuest(image string) (*guest, error) {
	if runtime.GOARCH != "amd64" {
		return nil, fmt.Errorf("show the guard in a virtual machine: that is possible on amd64, and this is %s. Use a kernel that lets BPF programs decide", runtime.GOARCH)
	}
	var missing []string
	if image == "" {
		if image = findKernel("/"); image == "" {
			missing = append(missing, "linux-image-cloud-amd64")
		}
	}
	if _, err := exec.LookPath(machine.Emulator); err != nil {
		missing = append(missing, "qemu-system-x86")
	}
	if len(missing) > 0 {
		return nil, absent(missing)
	}
	f, err := os.Open(image)
	if err != nil {
		return nil, fmt.Errorf("show the guard in a virtual machine: read its kernel: %w. Run this as root, or name a kernel that you may read with --kernel FILE", err)
	}
	return &guest{kernel: image}, f.Close()
}

// absent returns the error that names the Debian packages that are needed.
func absent(packages []string) error {
	return fmt.Errorf("show the guard in a virtual machine, because this kernel does not let BPF programs decide: this machine lacks programs for it. Run as root:\n\n"+
		"  apt-get install --no-install-recommends %s\n\n"+
		"On other distributions than Debian, install qemu for x86-64, and a kernel of Linux 6.1 or later with CONFIG_BPF_LSM=y and a serial console built in, named with --kernel FILE", strings.Join(packages, " "))
}

// findKernel returns the newest kernel below root that can let BPF programs decide; empty: there is none.
func findKernel(root string) (newest string) {
	var latest int64
	for _, boot := range boots {
		images, _ := filepath.Glob(filepath.Join(root, fmt.Sprintf(boot.image, "*"))) // the pattern is correct
		for _, image := range images {
			before, after, _ := strings.Cut(filepath.Join(root, boot.image), "%s")
			release := strings.TrimSuffix(strings.TrimPrefix(image, before), after)
			info, err := os.Stat(image)
			if err != nil || !canDecide(filepath.Join(root, fmt.Sprintf(boot.config, release))) {
				continue
			}
			if at := info.ModTime().UnixNano(); newest == "" || at > latest {
				newest, latest = image, at
			}
		}
	}
	return newest
}

// canDecide reports whether a kernel has BPF LSM, by its configuration.
func canDecide(config string) bool {
	text, err := os.ReadFile(config)
	return err == nil && slices.Contains(strings.Split(string(text), "\n"), "CONFIG_BPF_LSM=y")
}

// pack writes the guest's files into a folder: this program, and the programs of the story's scripts and editor.
func (g *guest) pack(ctx context.Context, executable, folder string) error {
	version, err := exec.CommandContext(ctx, machine.Emulator, "--version").Output()
	if err != nil {
		return fmt.Errorf("ask %s for its version: %w", machine.Emulator, err)
	}
	g.image, g.said, g.accelerator = filepath.Join(folder, "files"), filepath.Join(folder, "console"), machine.Accelerator(string(version))
	f, err := os.Create(g.image)
	if err != nil {
		return fmt.Errorf("pack the virtual machine's files: %w", err)
	}
	buffered := bufio.NewWriterSize(f, 1<<20)
	files := machine.NewArchive(buffered)
	errs := []error{files.AddProgram(stageProgram, executable)}
	for _, name := range []string{"sh", "sed"} {
		path, err := exec.LookPath(name)
		if err == nil {
			err = files.AddProgram("/bin/"+name, path)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(append(errs, files.Close(), buffered.Flush(), f.Close())...); err != nil {
		return fmt.Errorf("pack the virtual machine's files: %w", err)
	}
	return nil
}

// stageProgram is the path of shunt in the guest.
const stageProgram = "/bin/shunt"

// command returns the command that runs the guest: its first process is the stage, and its second serial line carries the story.
func (g *guest) command(ctx context.Context) *exec.Cmd {
	return exec.CommandContext(ctx, machine.Emulator,
		"-accel", g.accelerator, "-cpu", "max", "-smp", "2", "-m", "1G",
		"-no-reboot", "-nodefaults", "-no-user-config", "-display", "none",
		"-kernel", g.kernel, "-initrd", g.image,
		// lsm: distributions differ in whether bpf is active. The words after -- are the first process's arguments.
		"-append", "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic tsc=unstable lsm=bpf rdinit="+stageProgram+" -- demo guard-stage --machine",
		"-serial", "file:"+g.said, "-serial", "stdio")
}

// console returns the end of the guest kernel's output.
func (g *guest) console() string {
	text, err := os.ReadFile(g.said)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}
