package judge

import (
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// The operations that rules forbid without a word of the policy for them. All others have the policy's words.
const (
	WriteProgram = "write-program" // writing to a program that the rule trusts
	Trace        = "trace"         // taking control of a process, or using its memory or descriptors: policy.Ptrace and policy.Memory
)

// Masks are the rules that forbid an operation.
type Masks struct {
	Denied  uint64
	Audited uint64
	Only    uint64 // of these, the rules that forbid it only to certain processes
}

// MasksOf returns, by operation, the masks of the rules that forbid it. Every rule of files, and of detection, protects the programs that it trusts.
func MasksOf(rules []policy.Rule) map[string]Masks {
	all := map[string]Masks{}
	for i, r := range rules {
		var forbids []string
		if !r.IsOfProcesses() && len(r.By) == 0 {
			forbids = append(forbids, WriteProgram, Trace)
		}
		for _, word := range r.Deny {
			if word == policy.Ptrace || word == policy.Memory {
				word = Trace
			}
			forbids = append(forbids, word)
		}
		for _, operation := range forbids {
			masks := all[operation]
			if r.Mode == policy.Deny {
				masks.Denied |= 1 << i
			} else {
				masks.Audited |= 1 << i
			}
			if len(r.By) > 0 {
				masks.Only |= 1 << i
			}
			all[operation] = masks
		}
	}
	return all
}
