package datapath

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf/btf"
)

// Reason is why a packet was not simply forwarded, as core/reasons.h numbers it.
type Reason uint32

// String is the word in metrics, output and documentation, like "no_service".
func (r Reason) String() string {
	if name, ok := reasonNames()[r]; ok {
		return name
	}
	return fmt.Sprintf("reason_%d", uint32(r))
}

// Reasons lists every reason, by number.
func Reasons() []Reason {
	var all []Reason
	for r := range reasonNames() {
		if r != Reason(abiReasonREASON_NONE) {
			all = append(all, r)
		}
	}
	slices.Sort(all)
	return all
}

// reasonNames reads enum reason from the embedded object, so that C names them alone.
var reasonNames = sync.OnceValue(func() map[Reason]string {
	spec, err := loadAbi()
	if err != nil {
		panic("the embedded object of abi.bpf.c cannot be read: " + err.Error())
	}
	var enum *btf.Enum
	if err := spec.Types.TypeByName("reason", &enum); err != nil {
		panic("the embedded object of abi.bpf.c lacks enum reason: " + err.Error())
	}
	names := map[Reason]string{}
	for _, v := range enum.Values {
		if Reason(v.Value) != Reason(abiReasonREASON_COUNT) {
			names[Reason(v.Value)] = strings.ToLower(strings.TrimPrefix(v.Name, "REASON_"))
		}
	}
	return names
})
