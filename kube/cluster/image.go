package cluster

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// image is a name of the programs in containerd.
type image struct {
	name       string
	entrypoint []string
}

// blobs are the contents of an image layout by digest (OCI Image Format Specification, image-layout.md).
type blobs struct {
	archive *tar.Writer
	written map[string]bool
}

// descriptor identifies a blob (descriptor.md there).
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

const media = "application/vnd.oci.image."

// writeImages writes an archive with all images. They share one layer, with the files.
func writeImages(path string, images []image, files map[string]string) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() {
		if closing := file.Close(); err == nil {
			err = closing
		}
	}()
	layer, err := newLayer(files)
	if err != nil {
		return fmt.Errorf("make an image: %w", err)
	}
	b := &blobs{tar.NewWriter(file), map[string]bool{}}
	content, err := b.put("layer.v1.tar", layer)
	if err != nil {
		return err
	}
	var manifests []descriptor
	for _, i := range images {
		manifest, err := b.image(i, content)
		if err != nil {
			return err
		}
		manifest.Annotations = map[string]string{"io.containerd.image.name": i.name}
		manifests = append(manifests, manifest)
	}
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": manifests})
	if err != nil {
		return err
	}
	if err := b.write("index.json", index); err != nil {
		return err
	}
	if err := b.write("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	return b.archive.Close()
}

// image writes an image's configuration and its manifest, and returns the manifest's descriptor.
func (b *blobs) image(i image, layer descriptor) (descriptor, error) {
	configuration, err := b.putJSON("config.v1+json", map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Entrypoint": i.entrypoint},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{layer.Digest}},
	})
	if err != nil {
		return descriptor{}, err
	}
	return b.putJSON("manifest.v1+json", map[string]any{
		"schemaVersion": 2, "mediaType": media + "manifest.v1+json", "config": configuration, "layers": []descriptor{layer},
	})
}

// newLayer makes a file system with files of this machine, by their paths in it.
func newLayer(files map[string]string) ([]byte, error) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, path := range slices.Sorted(maps.Keys(files)) {
		content, err := os.ReadFile(files[path])
		if err != nil {
			return nil, err
		}
		if err := w.WriteHeader(&tar.Header{Name: path, Mode: 0o755, Size: int64(len(content))}); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return layer.Bytes(), err
}

// inRoot puts programs into an image's root. They need no other files.
func inRoot(programs ...string) (map[string]string, error) {
	files := map[string]string{}
	for _, path := range programs {
		if err := static(path); err != nil {
			return nil, fmt.Errorf("make an image: %w", err)
		}
		files[filepath.Base(path)] = path
	}
	return files, nil
}

// addWithLibraries adds programs of this machine, which are in the PATH, to an image's /bin, and their libraries
// to the paths where the loader looks for them.
func addWithLibraries(files map[string]string, programs ...string) error {
	for _, name := range programs {
		path, err := exec.LookPath(name)
		if err != nil {
			return fmt.Errorf("make an image: %w", err)
		}
		files["bin/"+name] = path
		// Each line is "NAME => PATH (ADDRESS)", or "PATH (ADDRESS)" for the loader (ldd(1)).
		needed, err := exec.Command("ldd", path).Output()
		if err != nil {
			return fmt.Errorf("make an image: find the libraries of %s: %w", path, err)
		}
		for word := range strings.FieldsSeq(string(needed)) {
			if strings.HasPrefix(word, "/") {
				files[word[1:]] = word
			}
		}
	}
	return nil
}

// static refuses a program that needs a loader, because the image has none.
func static(path string) error {
	file, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	defer file.Close()
	for _, part := range file.Progs {
		if part.Type == elf.PT_INTERP {
			return fmt.Errorf("%s is linked dynamically, and its image has no libraries: build it with CGO_ENABLED=0", path)
		}
	}
	return nil
}

func (b *blobs) putJSON(kind string, content any) (descriptor, error) {
	text, err := json.Marshal(content)
	if err != nil {
		return descriptor{}, err
	}
	return b.put(kind, text)
}

func (b *blobs) put(kind string, content []byte) (descriptor, error) {
	sum := sha256.Sum256(content)
	name := hex.EncodeToString(sum[:])
	d := descriptor{MediaType: media + kind, Digest: "sha256:" + name, Size: len(content)}
	if b.written[name] {
		return d, nil
	}
	b.written[name] = true
	return d, b.write("blobs/sha256/"+name, content)
}

func (b *blobs) write(name string, content []byte) error {
	if err := b.archive.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err := io.Copy(b.archive, bytes.NewReader(content))
	return err
}
