package rules

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// legacyTable is a table of iptables from before nf_tables. Its rules are counted and not judged.
type legacyTable struct {
	is6   bool
	name  string
	rules int  // without the policies
	drops bool // a chain that forwarded packets pass has the policy to drop
}

// judge returns a hazard as soon as the table has a rule.
func (t *legacyTable) judge(p Packets) *Hazard {
	if t.is6 != p.From[0].Is6() || t.name == "nat" && p.Established {
		return nil
	}
	word := "iptables-legacy "
	if t.is6 {
		word = "ip6tables-legacy "
	}
	if t.drops {
		return &Hazard{Chain: word + t.name, What: "a policy drops"}
	}
	if t.rules > 0 {
		return &Hazard{Chain: word + t.name, What: fmt.Sprintf("%d rules of iptables-legacy, which shunt does not judge", t.rules)}
	}
	return nil
}

// From linux/netfilter_ipv4/ip_tables.h and ip6_tables.h.
const (
	optionInfo    = 64 // IPT_SO_GET_INFO, IP6T_SO_GET_INFO
	optionEntries = 65 // IPT_SO_GET_ENTRIES, IP6T_SO_GET_ENTRIES
	nameSize      = 32 // XT_TABLE_MAXNAMELEN
	infoSize      = 84 // struct ipt_getinfo
	headerSize    = 40 // struct ipt_get_entries before its entries, which are aligned to 8 octets
	targetSize    = 32 // struct xt_entry_target, after which a standard target has its verdict
	verdictAccept = -netfilterAccept - 1
)

// readLegacy reads the tables that are in use. The question does not load a table.
func readLegacy() (tables []legacyTable, err error) {
	for _, is6 := range []bool{false, true} {
		path := "/proc/thread-self/net/ip_tables_names"
		if is6 {
			path = "/proc/thread-self/net/ip6_tables_names"
		}
		names, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, name := range strings.Fields(string(names)) {
			t, err := readLegacyTable(is6, name)
			if err != nil {
				return nil, fmt.Errorf("read the table %s of iptables-legacy: %w", name, err)
			}
			tables = append(tables, t)
		}
	}
	return tables, nil
}

func readLegacyTable(is6 bool, name string) (t legacyTable, err error) {
	t = legacyTable{is6: is6, name: name}
	family, level, entrySize := unix.AF_INET, unix.IPPROTO_IP, 112 // sizeof(struct ipt_entry)
	if is6 {
		family, level, entrySize = unix.AF_INET6, unix.IPPROTO_IPV6, 168 // sizeof(struct ip6t_entry)
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return t, err
	}
	defer unix.Close(fd)
	// struct ipt_getinfo: name, valid_hooks, hook_entry[5], underflow[5], num_entries, size.
	info := make([]byte, infoSize)
	copy(info[:nameSize-1], name)
	if err := getOption(fd, level, optionInfo, info); err != nil {
		return t, err
	}
	number := func(at int) int { return int(binary.NativeEndian.Uint32(info[at:])) }
	hooks, count, size := uint32(number(nameSize)), number(nameSize+44), number(nameSize+48)
	t.rules = max(0, count-bits.OnesCount32(hooks)-1) // a policy for each hook, and the end
	entries := make([]byte, headerSize+size)
	copy(entries[:nameSize-1], name)
	binary.NativeEndian.PutUint32(entries[nameSize:], uint32(size))
	if err := getOption(fd, level, optionEntries, entries); err != nil {
		return t, err // also EAGAIN, if the size has changed meanwhile
	}
	for _, hook := range []int{hookPrerouting, hookForward, hookPostrouting} {
		if hooks&(1<<hook) == 0 {
			continue
		}
		at := headerSize + number(nameSize+24+4*hook) + entrySize + targetSize // of the policy's verdict: underflow
		if at+4 > len(entries) {
			return t, fs.ErrInvalid
		}
		t.drops = t.drops || int32(binary.NativeEndian.Uint32(entries[at:])) != verdictAccept
	}
	return t, nil
}

// getOption calls getsockopt(2) with a buffer whose content is part of the question.
func getOption(fd, level, option int, buffer []byte) error {
	size := uint32(len(buffer))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&buffer[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
