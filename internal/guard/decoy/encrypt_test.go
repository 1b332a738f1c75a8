package decoy

import (
	"bytes"
	"cmp"
	"crypto/aes"
	"crypto/cipher"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// doing is the variable that makes the test's binary do something with files instead of testing: "WAY ORDER WORKERS FOLDER".
const doing = "SHUNT_DECOY_DO"

// oneFile is the variable that makes it treat one file: "WAY FILE".
const oneFile = "SHUNT_DECOY_ONE"

func TestMain(m *testing.M) {
	do := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if words := strings.SplitN(os.Getenv(dying), " ", 4); len(words) == 4 {
		do(die(words))
	}
	if words := strings.SplitN(os.Getenv(oneFile), " ", 2); len(words) == 2 {
		do(ways[words[0]](words[1]))
	}
	if words := strings.SplitN(os.Getenv(doing), " ", 4); len(words) == 4 {
		if words[0] == "open" {
			do(openOften(words[2], words[3]))
		}
		if other, is := others[words[0]]; is {
			do(other(words[3]))
		}
		do(encrypt(words[0], words[1], words[2], words[3]))
	}
	os.Exit(m.Run())
}

// file is one that an encryptor has found.
type file struct {
	path string
	info fs.FileInfo
}

// orders are the orders in which encryptors go through files. The walk lists a folder's files before its folders, by
// name.
var orders = map[string]func([]file){
	"name": func(all []file) {
		slices.SortFunc(all, func(a, b file) int { return cmp.Compare(filepath.Base(a.path), filepath.Base(b.path)) })
	},
	"name-reverse": func(all []file) {
		slices.SortFunc(all, func(a, b file) int { return cmp.Compare(filepath.Base(b.path), filepath.Base(a.path)) })
	},
	"newest": func(all []file) {
		slices.SortFunc(all, func(a, b file) int { return b.info.ModTime().Compare(a.info.ModTime()) })
	},
	"oldest": func(all []file) {
		slices.SortFunc(all, func(a, b file) int { return a.info.ModTime().Compare(b.info.ModTime()) })
	},
	"smallest": func(all []file) {
		slices.SortFunc(all, func(a, b file) int { return cmp.Compare(a.info.Size(), b.info.Size()) })
	},
	"largest": func(all []file) {
		slices.SortFunc(all, func(a, b file) int { return cmp.Compare(b.info.Size(), a.info.Size()) })
	},
	"depth-first": func([]file) {}, // the order of the walk
	"breadth-first": func(all []file) {
		slices.SortStableFunc(all, func(a, b file) int { return cmp.Compare(strings.Count(a.path, "/"), strings.Count(b.path, "/")) })
	},
	"bottom-up": func(all []file) {
		slices.SortStableFunc(all, func(a, b file) int { return cmp.Compare(strings.Count(b.path, "/"), strings.Count(a.path, "/")) })
	},
	"readdir": func([]file) {}, // as the kernel lists them
	"random": func(all []file) { // always the same
		r := rand.New(rand.NewPCG(7, 7))
		r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	},
}

// ways are the encryptors' treatments of a file.
var ways = map[string]func(path string) error{
	"in-place": inPlace,
	"rename-after": func(path string) error {
		if err := inPlace(path); err != nil {
			return err
		}
		return os.Rename(path, path+".locked")
	},
	"rename-before": func(path string) error {
		if err := os.Rename(path, path+".locked"); err != nil {
			return err
		}
		return inPlace(path + ".locked")
	},
	"copy-and-unlink": func(path string) error { return copied(path, path+".locked", os.Remove) },
	"copy-elsewhere": func(path string) error { // under names that say nothing
		return copied(path, filepath.Join(filepath.Dir(path), fmt.Sprintf("%x", rand.Uint64())), os.Remove)
	},
	"copy-first": func(path string) error { return copied(path, path+".locked", func(string) error { return nil }) },
	"rename-over": func(path string) error {
		return copied(path, path+".tmp", func(string) error { return os.Rename(path+".tmp", path) })
	},
	"truncate-and-write": func(path string) error {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(path, scrambled(text), 0o600)
	},
}

func scrambled(text []byte) []byte {
	block, _ := aes.NewCipher([]byte("sixteen bytes!!!"))
	cipher.NewCTR(block, make([]byte, block.BlockSize())).XORKeyStream(text, text)
	return text
}

func inPlace(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	text := make([]byte, 1<<13)
	n, err := f.ReadAt(text, 0)
	if n == 0 {
		return err
	}
	if _, err := f.WriteAt(scrambled(text[:n]), 0); err != nil {
		return err
	}
	return f.Close()
}

func copied(path, to string, then func(path string) error) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := os.WriteFile(to, scrambled(text), 0o600); err != nil {
		return err
	}
	return then(path)
}

// encrypt goes through the files below a folder. workers is a number of threads, or "fork" for a process for each file.
func encrypt(way, order, workers, folder string) error {
	var all []file
	if order == "readdir" {
		if err := asListed(folder, &all); err != nil {
			return err
		}
	} else if err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		all = append(all, file{path, info})
		return err
	}); err != nil {
		return err
	}
	orders[order](all)
	if workers == "fork" {
		for _, f := range all {
			c := exec.Command("/proc/self/exe")
			c.Env = append(os.Environ(), oneFile+"="+way+" "+f.path)
			if err := c.Run(); err != nil {
				return err
			}
		}
		return nil
	}
	count, err := strconv.Atoi(workers)
	if err != nil {
		return err
	}
	next := make(chan file)
	var ended sync.WaitGroup
	for range count {
		ended.Go(func() {
			for f := range next {
				_ = ways[way](f.path) // an encryptor goes on
			}
		})
	}
	for _, f := range all {
		next <- f
	}
	close(next)
	ended.Wait()
	return nil
}

// openOften opens a file so many times, and prints the nanoseconds of one open.
func openOften(count, path string) error {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	begin := time.Now()
	for range n {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	fmt.Println(float64(time.Since(begin).Nanoseconds()) / float64(n))
	return nil
}

func asListed(folder string, all *[]file) error {
	d, err := os.Open(folder)
	if err != nil {
		return err
	}
	defer d.Close() //nolint:errcheck // only read
	entries, err := d.ReadDir(-1)
	for _, e := range entries {
		path := filepath.Join(folder, e.Name())
		if e.IsDir() {
			if err := asListed(path, all); err != nil {
				return err
			}
			continue
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		*all = append(*all, file{path, info})
	}
	return err
}

// plain is the begin of users' files.
var plain = []byte("This is a letter of somebody.\n")

// harmedFiles is the number of the users' files that have changed.
func harmedFiles(t testing.TB, paths []string) (count int) {
	t.Helper()
	for _, path := range paths {
		if text, err := os.ReadFile(path); err != nil || !bytes.HasPrefix(text, plain) {
			count++
		}
	}
	return count
}

// others are the other deeds of the test's binary with files, beside encrypting.
var others = map[string]func(folder string) error{
	// As backup programs do: it reads all, and writes packs elsewhere.
	"back-up": func(folder string) error {
		pack, err := os.CreateTemp("", "pack")
		if err != nil {
			return err
		}
		defer os.Remove(pack.Name()) //nolint:errcheck // of a test
		return filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			text, err := os.ReadFile(path)
			if err == nil {
				_, err = pack.Write(scrambled(text))
			}
			return err
		})
	},
	// A person opens a decoy by mistake, and saves it.
	"edit": func(folder string) error {
		found, err := filepath.Glob(filepath.Join(folder, "zzz0*"))
		if err != nil || len(found) != 1 {
			return fmt.Errorf("%v, %w", found, err)
		}
		f, err := os.OpenFile(found[0], os.O_RDWR|os.O_APPEND, 0)
		if err != nil {
			return err
		}
		if _, err := f.WriteString("-- mine\n"); err != nil {
			return err
		}
		return f.Close()
	},
	"stat": func(folder string) error {
		return filepath.WalkDir(folder, func(_ string, d fs.DirEntry, err error) error {
			if err == nil {
				_, err = d.Info()
			}
			return err
		})
	},
	"encrypt-then-end": func(folder string) error { return encrypt("in-place", "name", "1", folder) },
}
