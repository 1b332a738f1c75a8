package store

import (
	"errors"
	"fmt"
	"reflect"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Batch is the number of elements that are read or written at once. A bucket of a hash has to fit.
const Batch = 4096

// Rows are elements of a size that only the map knows, as a slice of octet arrays, which the library's batch
// functions take, and as the same memory in octets.
type Rows struct {
	slice reflect.Value
	size  int
	bytes []byte
}

// MakeRows returns Rows for count elements of size octets.
func MakeRows(size uint32, count int) Rows {
	row := reflect.ArrayOf(int(size), reflect.TypeFor[byte]())
	slice := reflect.MakeSlice(reflect.SliceOf(row), count, count)
	return Rows{slice, int(size), unsafe.Slice((*byte)(slice.UnsafePointer()), int(size)*count)}
}

// At returns an element, as a part of the same memory.
func (r Rows) At(i int) []byte { return r.bytes[i*r.size : (i+1)*r.size] }

// First returns the first n elements, for a batch.
func (r Rows) First(n int) any { return r.slice.Slice(0, n).Interface() }

// Each calls f with every element of a map. f may use the slices until it returns.
func Each(m *ebpf.Map, f func(key, value []byte) error) error {
	var cursor ebpf.MapBatchCursor
	count := min(Batch, int(m.MaxEntries()))
	for {
		keys, values := MakeRows(m.KeySize(), count), MakeRows(m.ValueSize(), count)
		n, err := m.BatchLookup(&cursor, keys.First(count), values.First(count), nil)
		end := errors.Is(err, ebpf.ErrKeyNotExist)
		if errors.Is(err, unix.ENOSPC) && count < int(m.MaxEntries()) { // a bucket is larger
			count = min(2*count, int(m.MaxEntries()))
			continue
		}
		if err != nil && !end {
			return fmt.Errorf("read %s: %w", MapName(m), err)
		}
		for i := range n {
			if err := f(keys.At(i), values.At(i)); err != nil {
				return err
			}
		}
		if end {
			return nil
		}
	}
}

// MapName returns the kernel's name of a map.
func MapName(m *ebpf.Map) string {
	if info, err := m.Info(); err == nil && info.Name != "" {
		return info.Name
	}
	return m.String()
}
