package rules

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/shunt-lb/shunt/internal/lab"
	"golang.org/x/sys/unix"
)

// A policy that drops, of a table that nobody announces, is a hazard; one that accepts is none.
func TestLegacyPolicies(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	l, err := lab.New("")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	h, err := l.AddHost("node")
	if err != nil {
		t.Fatal(err)
	}
	p := Packets{
		From: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, To: []netip.Addr{netip.MustParseAddr("10.0.0.2")},
		In: []Link{{"veth1", 1}}, Out: []Link{{"veth2", 2}}, Established: true,
	}
	err = h.Run(func() error {
		set, err := Read()
		if err != nil || set.Find(p) != nil || len(set.legacy) > 0 {
			t.Errorf("in a new namespace: %v, %v, %v", err, set.Find(p), set.legacy)
		}
		// A process that asks for a table has the kernel make it, with policies that accept.
		if _, err := readLegacyTable(false, "filter"); err != nil {
			return err
		}
		if set, err = Read(); err != nil || set.Find(p) != nil || len(set.legacy) != 1 {
			t.Errorf("with an empty table: %v, %v, %v", err, set.Find(p), set.legacy)
		}
		if err := dropForwarded(); err != nil {
			return err
		}
		if err := set.Refresh(); err != nil {
			return err
		}
		if h := set.Find(p); h == nil || !strings.Contains(h.String(), "iptables-legacy filter: a policy drops") {
			t.Errorf("with a policy that drops: %v", h)
		}
		return nil
	})
	if errors.Is(err, unix.ENOPROTOOPT) {
		t.Skip("the kernel has no iptables-legacy")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// dropForwarded replaces the table filter by its own contents, with a policy of FORWARD that drops.
func dropForwarded() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	info := make([]byte, infoSize)
	copy(info, "filter")
	if err := getOption(fd, unix.IPPROTO_IP, optionInfo, info); err != nil {
		return err
	}
	count, size := binary.NativeEndian.Uint32(info[nameSize+44:]), binary.NativeEndian.Uint32(info[nameSize+48:])
	entries := make([]byte, headerSize+int(size))
	copy(entries, "filter")
	binary.NativeEndian.PutUint32(entries[nameSize:], size)
	if err := getOption(fd, unix.IPPROTO_IP, optionEntries, entries); err != nil {
		return err
	}
	entries = entries[headerSize:]
	forward := binary.NativeEndian.Uint32(info[nameSize+24+4*hookForward:])
	const entrySize, verdictDrop = 112, 0xffffffff // -NF_DROP - 1
	binary.NativeEndian.PutUint32(entries[forward+entrySize+targetSize:], verdictDrop)

	// struct ipt_replace: name, valid_hooks, num_entries, size, hook_entry, underflow, num_counters, counters, entries.
	counters := make([]byte, 16*count)
	replace := append([]byte{}, info[:nameSize+4]...)
	replace = binary.NativeEndian.AppendUint32(replace, count)
	replace = binary.NativeEndian.AppendUint32(replace, size)
	replace = append(replace, info[nameSize+4:nameSize+44]...)
	replace = binary.NativeEndian.AppendUint32(replace, count)
	replace = binary.NativeEndian.AppendUint64(replace, uint64(uintptr(unsafe.Pointer(&counters[0]))))
	replace = append(replace, entries...)
	const setReplace = 64 // IPT_SO_SET_REPLACE
	err = unix.SetsockoptString(fd, unix.IPPROTO_IP, setReplace, string(replace))
	runtime.KeepAlive(counters)
	return err
}
