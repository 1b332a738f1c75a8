package realserver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/shunt-lb/shunt/internal/record"
)

// RunDirectory is the folder of the records. It is emptied when the machine starts, as are the recorded
// changes.
const RunDirectory = "/run/shunt"

// Record is the stored state of one network namespace. Only the process that has it open may
// change that namespace's backend half.
type Record struct {
	path string
	lock *os.File
}

// OpenRecord locks the record of a namespace. It fails while another process has it. The kernel releases the
// lock with the process, however that ends.
func OpenRecord(directory, space string) (*Record, error) {
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return nil, fmt.Errorf("make %s: %w", directory, err)
	}
	r := &Record{path: filepath.Join(directory, "decap-"+space+".json")}
	path := r.lockPath()
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("open the lock %s: %w", path, err)
		}
		if err := record.Hold(f); err != nil {
			holder := record.Holder(f)
			_ = f.Close()
			if errors.Is(err, syscall.EWOULDBLOCK) {
				return nil, fmt.Errorf("`shunt decap` runs in this network namespace already, as process %s; stop that process first, or give it the other VIPs too",
					holder)
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		// The holder removes the file before it releases the lock: a process that waited for the old file tries
		// again.
		mine, err1 := f.Stat()
		there, err2 := os.Stat(path)
		if err1 == nil && err2 == nil && os.SameFile(mine, there) {
			r.lock = f
			record.Sweep(directory, filepath.Base(r.path)) // of a process that was killed while it wrote
			return r, nil
		}
		_ = f.Close()
	}
}

func (r *Record) lockPath() string { return strings.TrimSuffix(r.path, ".json") + ".lock" }

// Path returns the path of the stored state.
func (r *Record) Path() string { return r.path }

// Read returns the state that was stored last; an empty one if there is none.
func (r *Record) Read() (State, error) {
	var state State
	if err := record.Read(r.path, &state); err != nil {
		return State{}, fmt.Errorf("read the record of an earlier `shunt decap`: %w; `ip address show dev lo` and `sysctl -a` show its changes: undo them by hand, then delete %s", err, r.path)
	}
	return state, nil
}

// Write stores the state in one step; an empty one removes the file.
func (r *Record) Write(state State) error {
	if state.IsZero() {
		if err := record.Remove(r.path); err != nil {
			return fmt.Errorf("remove %s: %w", r.path, err)
		}
		return nil
	}
	if err := record.Write(r.path, state); err != nil {
		return fmt.Errorf("write %s: %w", r.path, err)
	}
	return nil
}

// Close releases the lock.
func (r *Record) Close() error {
	return errors.Join(os.Remove(r.lockPath()), r.lock.Close())
}
