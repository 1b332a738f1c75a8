package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/shunt-lb/shunt/internal/backend"
)

// For bpf_fib_lookup to answer questions asked from lo, which is how the programs find next
// hops by themselves, lo has to forward. Nothing is forwarded that was not before: no packet
// to be forwarded ever arrives on lo (docs/design/03-client-hops.md).
//
// Each instance writes down what it found, and who comes later what the first one found. So
// the last one to go in a network namespace switches it off again.

var loopbackForwarding = []string{"net/ipv4/conf/lo/forwarding", "net/ipv6/conf/lo/forwarding"}

const loopbackSuffix = ".loopback"

// loopbackRecord is what one instance has to put back.
type loopbackRecord struct {
	Space string        `json:"space"` // the network namespace it is about
	State backend.State `json:"state"`
}

func loopbackPath(instance string) string {
	return filepath.Join(runDirectory, instance+loopbackSuffix)
}

func readLoopback(path string) (record loopbackRecord, err error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return record, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &record)
	}
	if err != nil {
		return record, fmt.Errorf("read what was set for lo: %w; `sysctl -a --pattern conf.lo.forwarding` shows it, then delete the file", err)
	}
	return record, nil
}

// loopbackLock makes instances take turns.
func loopbackLock() (unlock func(), err error) {
	f, err := os.Open(runDirectory)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", runDirectory, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// others are the settings that other instances have made in a network namespace.
func others(instance, space string) (made []backend.Setting) {
	paths, _ := filepath.Glob(filepath.Join(runDirectory, "*"+loopbackSuffix))
	for _, path := range paths {
		if record, err := readLoopback(path); err == nil && path != loopbackPath(instance) && record.Space == space {
			made = append(made, record.State.Settings...)
		}
	}
	return made
}

// forwardOnLoopback switches it on, and writes down first what it was.
func forwardOnLoopback(instance string) error {
	space, err := backend.Space()
	if err != nil {
		return err
	}
	unlock, err := loopbackLock()
	if err != nil {
		return err
	}
	defer unlock()
	record, err := readLoopback(loopbackPath(instance))
	if err != nil {
		return err
	}
	if record.Space != space {
		record = loopbackRecord{Space: space}
	}
	var missing []string
	for _, name := range loopbackForwarding {
		value, err := os.ReadFile("/proc/sys/" + name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without that family
		}
		if err != nil {
			return fmt.Errorf("read whether lo forwards: %w", err)
		}
		before := strings.TrimSpace(string(value))
		if before != "1" {
			missing = append(missing, name)
		}
		same := func(s backend.Setting) bool { return s.Name == name }
		if slices.ContainsFunc(record.State.Settings, same) {
			continue
		}
		made := others(instance, space)
		if i := slices.IndexFunc(made, same); i >= 0 {
			record.State.Settings = append(record.State.Settings, made[i])
		} else if before != "1" {
			record.State.Settings = append(record.State.Settings, backend.Setting{Name: name, Before: before, Set: "1"})
		}
	}
	if !record.State.IsZero() {
		text, err := json.Marshal(record)
		if err == nil {
			err = os.WriteFile(loopbackPath(instance), text, 0o600)
		}
		if err != nil {
			return fmt.Errorf("write down that lo did not forward: %w", err)
		}
	}
	for _, name := range missing {
		if err := os.WriteFile("/proc/sys/"+name, []byte("1"), 0o644); err != nil {
			return fmt.Errorf("switch forwarding on for lo: %w", err)
		}
	}
	return nil
}

// releaseLoopback puts back what an instance found, unless another one needs it as it is.
func releaseLoopback(instance string, log *slog.Logger) error {
	path := loopbackPath(instance)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	space, err := backend.Space()
	if err != nil {
		return err
	}
	unlock, err := loopbackLock()
	if err != nil {
		return err
	}
	defer unlock()
	record, err := readLoopback(path)
	if err != nil {
		return err
	}
	if record.Space != space {
		log.Warn("forwarding on lo stays on in another network namespace", "namespace", record.Space)
		return os.Remove(path)
	}
	needed := others(instance, space)
	record.State.Settings = slices.DeleteFunc(record.State.Settings, func(s backend.Setting) bool { return slices.Contains(needed, s) })
	_, err = record.State.Restore()
	return errors.Join(err, os.Remove(path))
}
