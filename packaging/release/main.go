// Release builds the published files, for each architecture: a tarball and a .deb with the
// static binary, manual pages, completions, the unit and the documents; and SHA256SUMS.
//
//	go run ./packaging/release --version 0.1.0 --out dist
//
// The same commit gives the same bytes, on any machine: no paths, no times but the commit's
// (SOURCE_DATE_EPOCH, if set), no order but the alphabet's. nfpm, at a pinned version, makes
// the .deb.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const nfpm = "github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.4"

// architectures, in Go's words and in Debian's.
var architectures = []string{"amd64", "arm64"}

// documents lie beside the binary in a tarball.
var documents = []string{"README.md", "CHANGELOG.md", "KNOWN_ISSUES.md", "SECURITY.md", "LICENSE", "LICENSES/BSD-2-Clause.txt",
	"LICENSES/GPL-2.0-only.txt", "packaging/shunt.yaml", "packaging/systemd/shunt.service", "packaging/systemd/shunt-guard.service"}

// release has the settings of one run.
type release struct {
	version    string
	maintainer string
	out        string
	arches     []string
	time       time.Time
	root       string // of the repository
	stage      string // a temporary folder
}

func main() {
	r := release{}
	flag.StringVar(&r.version, "version", "", "as users see it, for example 0.1.0; the default is what git describes")
	flag.StringVar(&r.out, "out", "dist", "folder for the result; must not exist, or be a former result")
	flag.StringVar(&r.maintainer, "maintainer", "shunt maintainers <maintainers@shunt.invalid>", "of the package")
	arch := flag.String("arch", strings.Join(architectures, ","), "architectures, comma separated")
	flag.Parse()
	r.arches = strings.Split(*arch, ",")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := r.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1) //nolint:gocritic // nothing is left to stop
	}
}

func (r *release) run(ctx context.Context) (err error) {
	if r.root, err = output(ctx, ".", nil, "git", "rev-parse", "--show-toplevel"); err != nil {
		return err
	}
	if r.out, err = filepath.Abs(r.out); err != nil {
		return err
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	if r.stage, err = os.MkdirTemp("", "shunt-release-"); err != nil {
		return err
	}
	defer os.RemoveAll(r.stage)
	if err := r.generated(); err != nil {
		return err
	}
	if err := r.clearOut(); err != nil {
		return err
	}
	for _, arch := range r.arches {
		if err := r.build(ctx, arch); err != nil {
			return fmt.Errorf("%s: %w", arch, err)
		}
	}
	return r.sums()
}

var versionForm = regexp.MustCompile(`^[0-9][0-9A-Za-z.+~-]*$`)

// settle finds the version and the time.
func (r *release) settle(ctx context.Context) error {
	epoch := os.Getenv("SOURCE_DATE_EPOCH")
	var err error
	if epoch == "" {
		if epoch, err = output(ctx, r.root, nil, "git", "log", "-1", "--format=%ct"); err != nil {
			return err
		}
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH is %q, which is no number of seconds: %w", epoch, err)
	}
	r.time = time.Unix(seconds, 0).UTC()
	if r.version == "" {
		described, err := output(ctx, r.root, nil, "git", "describe", "--tags", "--always", "--dirty")
		if err != nil {
			return err
		}
		if r.version = strings.TrimPrefix(described, "v"); !versionForm.MatchString(r.version) || !strings.Contains(r.version, ".") {
			r.version = "0~" + r.time.Format("20060102") + "." + described // no tag: older than any release
		}
	}
	if !versionForm.MatchString(r.version) {
		return fmt.Errorf("--version %q: a version begins with a digit and has letters, digits and .+~- in it", r.version)
	}
	return nil
}

// generated writes manual pages and completions, which are the same for all architectures.
func (r *release) generated() error {
	for _, folder := range []string{"man", "completions"} {
		if err := os.Mkdir(filepath.Join(r.stage, folder), 0o755); err != nil {
			return err
		}
	}
	pages := filepath.Join(r.stage, "man")
	if err := writeManual(pages, r.version, r.time); err != nil {
		return err
	}
	entries, err := os.ReadDir(pages)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := filepath.Join(pages, e.Name())
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if err := os.WriteFile(name+".gz", compressed(text), 0o644); err != nil {
			return err
		}
	}
	return writeCompletions(filepath.Join(r.stage, "completions"))
}

// clearOut makes the folder for the result, and removes an earlier run's files from it.
func (r *release) clearOut() error {
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() != "SHA256SUMS" && !strings.HasPrefix(e.Name(), "shunt") {
			return fmt.Errorf("%s has %s in it, which no release made; name another folder with --out", r.out, e.Name())
		}
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(r.out, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// build makes the binary, the tarball and the package of an architecture.
func (r *release) build(ctx context.Context, arch string) error {
	if !slices.Contains(architectures, arch) {
		return fmt.Errorf("the architectures are %s", strings.Join(architectures, " and "))
	}
	binary := filepath.Join(r.stage, "shunt")
	env := []string{"CGO_ENABLED=0", "GOOS=linux", "GOARCH=" + arch, "GOFLAGS=-trimpath"}
	if _, err := output(ctx, r.root, env, "go", "build", "-buildvcs=false",
		"-ldflags=-s -w -buildid= -X github.com/shunt-lb/shunt/internal/cli.release="+r.version, "-o", binary, "./cmd/shunt"); err != nil {
		return err
	}
	if err := r.tarball(arch, binary); err != nil {
		return err
	}
	env = []string{"ARCH=" + arch, "VERSION=" + r.version, "MAINTAINER=" + r.maintainer, "STAGE=" + r.stage,
		"MTIME=" + r.time.Format(time.RFC3339), "SOURCE_DATE_EPOCH=" + strconv.FormatInt(r.time.Unix(), 10)}
	config, err := os.ReadFile(filepath.Join(r.root, "packaging", "nfpm.yaml"))
	if err != nil {
		return err
	}
	// nfpm expands variables in some fields only, and the time is not one of them.
	text := os.Expand(string(config), func(name string) string {
		for _, e := range env {
			if value, is := strings.CutPrefix(e, name+"="); is {
				return value
			}
		}
		return "$" + name
	})
	filled := filepath.Join(r.stage, "nfpm-"+arch+".yaml")
	if err := os.WriteFile(filled, []byte(text), 0o644); err != nil {
		return err
	}
	target := filepath.Join(r.out, fmt.Sprintf("shunt_%s_%s.deb", r.version, arch))
	_, err = output(ctx, r.root, env[len(env)-1:], "go", "run", nfpm, "package", "--config", filled, "--packager", "deb", "--target", target)
	return err
}

// tarball packs everything under one folder.
func (r *release) tarball(arch, binary string) error {
	folder := fmt.Sprintf("shunt-%s-linux-%s", r.version, arch)
	files := map[string]string{"shunt": binary} // name in the tarball: file
	for _, document := range documents {
		name := strings.TrimPrefix(strings.TrimPrefix(document, "packaging/systemd/"), "packaging/")
		files[name] = filepath.Join(r.root, document)
	}
	for _, pattern := range []string{"man/*.1", "completions/*"} {
		found, err := filepath.Glob(filepath.Join(r.stage, pattern))
		if err != nil {
			return err
		}
		for _, file := range found {
			files[path.Join(path.Dir(pattern), filepath.Base(file))] = file
		}
	}
	guide, err := filepath.Glob(filepath.Join(r.root, "docs/guide/*"))
	if err != nil {
		return err
	}
	for _, file := range guide {
		files["docs/guide/"+filepath.Base(file)] = file
	}
	var content bytes.Buffer
	w := tar.NewWriter(&content)
	names := make([]string, 0, len(files))
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		data, err := os.ReadFile(files[name])
		if err != nil {
			return err
		}
		mode := int64(0o644)
		if name == "shunt" {
			mode = 0o755
		}
		header := &tar.Header{Name: folder + "/" + name, Mode: mode, Size: int64(len(data)), ModTime: r.time, Uname: "root", Gname: "root", Format: tar.FormatUSTAR}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		if _, err := w.Write(data); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, folder+".tar.gz"), compressed(content.Bytes()), 0o644)
}

// compressed returns data compressed by gzip, without a name and a time.
func compressed(data []byte) []byte {
	var b bytes.Buffer
	w, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // the level is right
	_, _ = w.Write(data)                                  // into memory
	_ = w.Close()
	return b.Bytes()
}

// sums writes SHA256SUMS, as sha256sum does.
func (r *release) sums() error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, e := range entries {
		f, err := os.Open(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		sum := sha256.New()
		_, err = io.Copy(sum, f)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		fmt.Fprintf(&text, "%x  %s\n", sum.Sum(nil), e.Name())
	}
	fmt.Print(text.String())
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS"), []byte(text.String()), 0o644)
}

// output runs a command, with variables in addition to the environment, and returns its output.
func output(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	var errors bytes.Buffer
	cmd.Stderr = &errors
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, out, errors.String())
	}
	return strings.TrimSpace(string(out)), nil
}
