package sensor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// BTF describes a kernel's types. Programs are fitted to it.
type BTF struct {
	Spec *btf.Spec // nil: the running kernel's own
	From string    // the source, for people
}

// kernelBTF is the file in which a kernel with CONFIG_DEBUG_INFO_BTF describes its types.
const kernelBTF = "/sys/kernel/btf/vmlinux"

// FindBTF finds the description of the running kernel's types: file if it is not empty, else the kernel's own,
// else the first of the folders that has one. A folder has the layout of the BTFHub archive,
// ID/VERSION_ID/ARCH/RELEASE.btf with the words of /etc/os-release and of uname(1), or RELEASE.btf. The error
// names a source of BTF.
func FindBTF(file string, folders ...string) (BTF, error) {
	return search{kernelBTF, "/etc/os-release"}.find(file, folders)
}

// search holds the paths that tests change.
type search struct{ kernel, osRelease string }

func (s search) find(file string, folders []string) (BTF, error) {
	if file != "" {
		return load(file)
	}
	_, err := os.Stat(s.kernel)
	if err == nil {
		return BTF{From: "the kernel's own, " + s.kernel}, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return BTF{}, fmt.Errorf("look for the kernel's description of its types: %w", err)
	}
	release, err := kernelRelease()
	if err != nil {
		return BTF{}, err
	}
	var looked []string
	for _, folder := range folders {
		for _, path := range []string{filepath.Join(folder, s.archivePath(), release+".btf"), filepath.Join(folder, release+".btf")} {
			switch _, err := os.Stat(path); {
			case err == nil:
				return load(path)
			case !errors.Is(err, os.ErrNotExist):
				return BTF{}, fmt.Errorf("look for a description of the kernel's types: %w", err)
			}
			if packed := path + ".tar.xz"; exists(packed) {
				return BTF{}, fmt.Errorf("%s is packed: unpack it with `tar -C %s -xf %s`", packed, filepath.Dir(packed), packed)
			}
			looked = append(looked, path)
		}
	}
	return BTF{}, fmt.Errorf("the kernel %s has no description of its types (BTF) at %s, and none of these files exists: %s. shunt cannot fit its programs to this kernel. "+
		"Name a file, get one for this release from the BTFHub archive into one of these places, or make one from the kernel's debug package with `pahole -J`",
		release, s.kernel, strings.Join(looked, ", "))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func load(path string) (BTF, error) {
	spec, err := btf.LoadSpec(path)
	if err != nil {
		return BTF{}, fmt.Errorf("read the kernel's types from %s: %w", path, err)
	}
	return BTF{spec, path}, nil
}

func kernelRelease() (string, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "", fmt.Errorf("read the kernel's release: %w", err)
	}
	return unix.ByteSliceToString(name.Release[:]), nil
}

// archivePath is the BTFHub archive's folder for this machine; "" if os-release does not name the
// distribution.
func (s search) archivePath() string {
	text, err := os.ReadFile(s.osRelease)
	if err != nil {
		return ""
	}
	words := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			words[name] = strings.Trim(value, `"'`)
		}
	}
	arch := map[string]string{"amd64": "x86_64"}[runtime.GOARCH]
	if arch == "" {
		arch = runtime.GOARCH
	}
	return filepath.Join(words["ID"], words["VERSION_ID"], arch)
}
