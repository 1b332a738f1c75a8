package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/machine"
)

// program is a program of the host, and its Debian package.
type program struct{ name, pkg string }

// programs are needed by every guest.
var programs = []program{
	{machine.Emulator, "qemu-system-x86"},
	{"xz", "xz-utils"},            // the modules of 6.12 are compressed
	{"busybox", "busybox-static"}, // tests start ordinary programs as children
}

// needPrograms makes sure that all programs are there: as root it installs missing ones and says so,
// otherwise it names the packages to install.
func needPrograms(ctx context.Context, programs []program) error {
	var missing []string
	for _, p := range programs {
		if _, err := exec.LookPath(p.name); err != nil {
			missing = append(missing, p.pkg)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	install := append([]string{"install", "-y", "--no-install-recommends"}, missing...)
	command := "apt-get " + strings.Join(install, " ")
	if os.Geteuid() != 0 {
		return fmt.Errorf("not installed: %s; as root: %s", strings.Join(missing, ", "), command)
	}
	fmt.Println("installing Debian packages:", command)
	if out, err := exec.CommandContext(ctx, "apt-get", install...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", command, err, out)
	}
	return nil
}

// kernel is an unpacked kernel package.
type kernel struct {
	release string // uname -r
	image   string // path of vmlinuz
	modules string // path of lib/modules/<release>
}

// findKernel returns the newest unpacked kernel of a series ("6.1") below dir, and fetches one if
// there is none. Remove the directory to get a newer one.
func findKernel(ctx context.Context, dir, series string) (kernel, error) {
	if !regexp.MustCompile(`^\d+\.\d+$`).MatchString(series) {
		return kernel{}, fmt.Errorf("kernel series %q: want two numbers such as 6.12", series)
	}
	k, err := unpackedKernel(dir, series)
	if err == nil || !errors.Is(err, os.ErrNotExist) {
		return k, err
	}
	if err := downloadKernel(ctx, dir, series); err != nil {
		return kernel{}, err
	}
	return unpackedKernel(dir, series)
}

// unpackedKernel finds the newest vmlinuz of the series in dir; os.ErrNotExist if there is none.
func unpackedKernel(dir, series string) (kernel, error) {
	images, err := filepath.Glob(filepath.Join(dir, "*", "boot", "vmlinuz-"+series+".*"))
	if err != nil {
		return kernel{}, err
	}
	if len(images) == 0 {
		return kernel{}, fmt.Errorf("no kernel %s in %s: %w", series, dir, os.ErrNotExist)
	}
	sort.Slice(images, func(i, j int) bool { return naturalLess(filepath.Base(images[i]), filepath.Base(images[j])) })
	image := images[len(images)-1]
	k := kernel{image: image, release: strings.TrimPrefix(filepath.Base(image), "vmlinuz-")}
	top := filepath.Dir(filepath.Dir(image))
	for _, lib := range []string{"lib", "usr/lib"} { // trixie's packages use /usr/lib
		k.modules = filepath.Join(top, lib, "modules", k.release)
		if _, err := os.Stat(k.modules); err == nil {
			return k, nil
		}
	}
	return kernel{}, fmt.Errorf("%s has no modules beside it; remove %s and run this again", image, top)
}

// downloadKernel fetches and unpacks the newest cloud kernel of a series that apt
// knows. Nothing is installed, and root is not needed.
func downloadKernel(ctx context.Context, dir, series string) error {
	name, err := newestPackage(ctx, series)
	if err != nil {
		return err
	}
	return unpack(ctx, dir, strings.TrimPrefix(name, "linux-image-"), name)
}

// unpack fetches Debian packages and unpacks them into one folder below dir.
func unpack(ctx context.Context, dir, folder string, packages ...string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	debs, err := os.MkdirTemp(dir, "download-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(debs)
	names := strings.Join(packages, " ")
	fmt.Println("fetching from Debian", names, "(unpacked into "+dir+", not installed)")
	get := exec.CommandContext(ctx, "apt-get", append([]string{"download"}, packages...)...)
	get.Dir = debs
	if out, err := get.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get download %s: %w; is the package list current (apt-get update)?\n%s", names, err, out)
	}
	files, err := filepath.Glob(filepath.Join(debs, "*.deb"))
	if err != nil || len(files) != len(packages) {
		return fmt.Errorf("apt-get download %s left %d files in %s, not %d", names, len(files), debs, len(packages))
	}
	// Unpacked beside the target and renamed, so that a half unpacked kernel is never found.
	tree := filepath.Join(debs, "tree")
	for _, file := range files {
		if out, err := exec.CommandContext(ctx, "dpkg", "-x", file, tree).CombinedOutput(); err != nil {
			return fmt.Errorf("dpkg -x %s: %w\n%s", file, err, out)
		}
	}
	return os.Rename(tree, filepath.Join(dir, folder))
}

// newestPackage names the newest cloud kernel package of a series.
func newestPackage(ctx context.Context, series string) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-cache", "pkgnames", "linux-image-"+series+".").Output()
	if err != nil {
		return "", fmt.Errorf("apt-cache pkgnames: %w; kernels come from Debian's archive, so this needs apt", err)
	}
	names := strings.Fields(string(out))
	for _, suffix := range []string{"-cloud-amd64-unsigned", "-cloud-amd64"} {
		newest := ""
		for _, name := range names {
			if strings.HasSuffix(name, suffix) && naturalLess(newest, name) && hasCandidate(ctx, name) {
				newest = name
			}
		}
		if newest != "" {
			return newest, nil
		}
	}
	return "", fmt.Errorf("apt knows no linux-image-%s.*-cloud-amd64: run apt-get update, or add the Debian release that has it "+
		"(6.1: bookworm; 6.12: trixie, or bookworm-security) to apt's sources", series)
}

// hasCandidate reports whether apt could download the package: apt-cache also lists names that only
// other packages mention.
func hasCandidate(ctx context.Context, name string) bool {
	out, err := exec.CommandContext(ctx, "apt-cache", "show", "--no-all-versions", name).Output()
	return err == nil && len(out) > 0
}

// naturalLess orders names by their numbers, so that 6.1.0-9 is before 6.1.0-10.
func naturalLess(a, b string) bool {
	chunks := regexp.MustCompile(`\d+|\D+`)
	x, y := chunks.FindAllString(a, -1), chunks.FindAllString(b, -1)
	for i := 0; i < len(x) && i < len(y); i++ {
		if x[i] == y[i] {
			continue
		}
		m, errM := strconv.Atoi(x[i])
		n, errN := strconv.Atoi(y[i])
		if errM == nil && errN == nil && m != n {
			return m < n
		}
		return x[i] < y[i]
	}
	return len(x) < len(y)
}

// findRoot returns a tarball of a small Debian system with systemd, and makes one below dir if there
// is none. Remove it to get a newer one.
func findRoot(ctx context.Context, dir, release string) (string, error) {
	file := filepath.Join(dir, "root-"+release+".tar")
	if _, err := os.Stat(file); err == nil {
		return file, nil
	}
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		return "", fmt.Errorf("make a Debian system: %w; as root: apt-get install mmdebstrap", err)
	}
	fmt.Printf("making a Debian %s system with mmdebstrap\n", release)
	// /usr is merged beforehand: the package that does it later needs the parts of Perl left out here.
	args := []string{"--variant=minbase", "--include=systemd,dbus,iproute2,usr-is-merged", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"}
	for _, folder := range []string{"doc", "man", "locale", "i18n", "perl", "zoneinfo"} { // folders that no test needs
		args = append(args, "--dpkgopt=path-exclude=/usr/share/"+folder+"/*")
	}
	fresh := file + ".new"
	if out, err := exec.CommandContext(ctx, "mmdebstrap", append(args, "--format=tar", release, fresh)...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("mmdebstrap: %w\n%s", err, out)
	}
	return file, os.Rename(fresh, file)
}
