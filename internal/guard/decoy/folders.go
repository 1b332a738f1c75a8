package decoy

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// FoldersMax limits the number of folders with decoys.
const FoldersMax = 512

func join(folder, name string) string { return folder + "/" + name }

// Folder is a folder for decoys, and the part of the policy that asks for it.
type Folder struct {
	Path string
	Part *policy.Decoys
}

// Find returns the folders that parts of a policy ask for, upper folders first, and in words the folders that it leaves out. The error says
// that a folder which the policy names cannot be read.
func Find(parts []policy.Decoys) (folders []Folder, left []string, err error) {
	f := finder{taken: map[string]bool{}}
	for i := range parts {
		for _, folder := range parts[i].Folders {
			if err := f.base(folder, &parts[i]); err != nil {
				return nil, nil, err
			}
		}
	}
	if f.over > 0 {
		f.left = append(f.left, fmt.Sprintf("%d more folders: at most %d have decoys; name fewer, or lower depth", f.over, FoldersMax))
	}
	return f.folders, f.left, nil
}

type finder struct {
	folders []Folder
	left    []string
	taken   map[string]bool
	over    int
}

func (f *finder) base(folder string, part *policy.Decoys) error {
	info, err := os.Lstat(folder)
	if err == nil && !info.IsDir() {
		err = errors.New("it is no folder; symbolic links are not followed")
	}
	if err != nil {
		return fmt.Errorf("find the folder %s for decoys: %w", folder, err)
	}
	var own unix.Stat_t
	if err := unix.Lstat(folder, &own); err != nil {
		return fmt.Errorf("find the folder %s for decoys: %w", folder, err)
	}
	level := []string{folder}
	for depth := 0; depth <= part.Depth && len(level) > 0; depth++ {
		var next []string
		for _, one := range level {
			below, err := f.visit(one, own.Dev, part)
			if err != nil && depth == 0 {
				return fmt.Errorf("find folders in %s for decoys: %w", folder, err)
			}
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				f.left = append(f.left, fmt.Sprintf("%s: %v", one, err))
			}
			next = append(next, below...)
		}
		level = next
	}
	return nil
}

// visit adds a folder, and lists the folders in it.
func (f *finder) visit(folder string, device uint64, part *policy.Decoys) (below []string, err error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if e.Name() == ".git" {
			f.left = append(f.left, folder+": it is a working tree of git, which would list decoys as new files")
			return nil, nil
		}
		path := filepath.Join(folder, e.Name())
		var s unix.Stat_t
		if !e.IsDir() || strings.HasPrefix(e.Name(), ".") || unix.Lstat(path, &s) != nil || s.Dev != device {
			continue // programs keep files of their own in hidden folders; another file system may be no disk
		}
		below = append(below, path)
	}
	switch {
	case f.taken[folder]:
	case len(f.folders) >= FoldersMax:
		f.over++
	default:
		f.taken[folder] = true
		f.folders = append(f.folders, Folder{folder, part})
	}
	return below, nil
}
