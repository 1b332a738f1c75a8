// Package symbol names the kernel's functions, for stacks.
package symbol

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Table has the kernel's functions by address.
type Table struct {
	addresses []uint64
	names     []string
}

// kernelFunction is a function of the kernel; its address is 0 if the kernel hides it.
type kernelFunction struct {
	address uint64
	name    string
}

// functions reads the kernel's list.
func functions() (all []kernelFunction, err error) {
	f, err := os.Open("/proc/kallsyms")
	if err != nil {
		return nil, fmt.Errorf("read the names of the kernel's functions: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 3 || !strings.ContainsAny(fields[1], "tTwW") {
			continue
		}
		if address, err := strconv.ParseUint(fields[0], 16, 64); err == nil {
			all = append(all, kernelFunction{address, fields[2]})
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read the names of the kernel's functions: %w", err)
	}
	return all, nil
}

// Functions returns the names of the kernel's functions, including those of its modules.
func Functions() (names []string, err error) {
	all, err := functions()
	for _, f := range all {
		names = append(names, f.name)
	}
	return names, err
}

// Read reads the kernel's list. It is an error if the kernel hides the addresses.
func Read() (*Table, error) {
	all, err := functions()
	if err != nil {
		return &Table{}, err
	}
	all = slices.DeleteFunc(all, func(f kernelFunction) bool { return f.address == 0 })
	if len(all) == 0 {
		return &Table{}, errors.New("the kernel hides the addresses of its functions, so stacks have no names; `sysctl kernel.kptr_restrict=1` shows them to root")
	}
	slices.SortStableFunc(all, func(a, b kernelFunction) int { return cmp.Compare(a.address, b.address) })
	s := &Table{}
	for _, one := range all {
		s.addresses, s.names = append(s.addresses, one.address), append(s.names, one.name)
	}
	return s, nil
}

// Name returns the function of an address, and the distance from its beginning; the number if there is none.
func (s *Table) Name(address uint64) string {
	i, found := slices.BinarySearch(s.addresses, address)
	if !found {
		i--
	}
	if i < 0 {
		return fmt.Sprintf("%#x", address)
	}
	return fmt.Sprintf("%s+%#x", s.names[i], address-s.addresses[i])
}

// Address returns the address of a function of the kernel.
func Address(function string) (uint64, error) {
	addresses, errs := Addresses(function)
	return addresses[0], errs[0]
}

// Addresses returns the addresses of functions of the kernel, in their order, with an error or nil for each. It reads the kernel's list once.
func Addresses(names ...string) (addresses []uint64, errs []error) {
	all, failed := functions()
	for _, name := range names {
		address, err := addressIn(all, name)
		if failed != nil {
			err = fmt.Errorf("find %s: %w", name, failed)
		}
		addresses, errs = append(addresses, address), append(errs, err)
	}
	return addresses, errs
}

func addressIn(all []kernelFunction, function string) (uint64, error) {
	i := slices.IndexFunc(all, func(f kernelFunction) bool { return f.name == function })
	switch {
	case i < 0:
		return 0, fmt.Errorf("this kernel has no function %s", function)
	case all[i].address == 0:
		return 0, fmt.Errorf("the kernel hides the address of %s; `sysctl kernel.kptr_restrict=1` shows it to root", function)
	}
	return all[i].address, nil
}
