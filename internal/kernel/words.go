package kernel

import (
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// Words are the names of an enum in an embedded object, by their numbers, so that C names them alone: REASON_NO_BACKEND is
// no_backend with the prefix REASON_. A name that ends in _COUNT is none. It panics if the object does not have the enum, so
// every test would fail.
func Words(load func() (*ebpf.CollectionSpec, error), enum, prefix string) map[uint32]string {
	spec, err := load()
	if err != nil {
		panic(fmt.Sprintf("the embedded object with enum %s cannot be read: %v", enum, err))
	}
	var found *btf.Enum
	if err := spec.Types.TypeByName(enum, &found); err != nil {
		panic(fmt.Sprintf("the embedded object lacks enum %s: %v", enum, err))
	}
	words := map[uint32]string{}
	for _, v := range found.Values {
		if !strings.HasSuffix(v.Name, "_COUNT") {
			words[uint32(v.Value)] = strings.ToLower(strings.TrimPrefix(v.Name, prefix))
		}
	}
	return words
}
