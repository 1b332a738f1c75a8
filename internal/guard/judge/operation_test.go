package judge

import (
	"maps"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

func TestMasks(t *testing.T) {
	for name, c := range map[string]struct {
		rules []policy.Rule
		want  map[string]Masks
	}{
		"rules of files and processes": {[]policy.Rule{
			{Paths: []string{"/a"}, Deny: []string{policy.Write, policy.Mount}, Mode: policy.Deny},
			{Paths: []string{"/a"}, Deny: []string{policy.Write}, Mode: policy.Audit},
			{Paths: []string{"/a"}, Deny: []string{policy.Chmod}, Mode: policy.Deny},
			{Program: "/p", Deny: []string{policy.Kill}, Mode: policy.Deny},
			{Program: "/p", Deny: []string{policy.Memory}, Mode: policy.Audit},
		}, map[string]Masks{
			policy.Write: {Denied: 1, Audited: 2}, policy.Mount: {Denied: 1}, policy.Chmod: {Denied: 4}, WriteProgram: {Denied: 5, Audited: 2}, Trace: {Denied: 5, Audited: 2 | 16},
			policy.Kill: {Denied: 8},
		}},
		"rules of detection, and updaters": {[]policy.Rule{
			{IsDetected: true, Paths: []string{"/a"}, Deny: []string{policy.Read}, By: []string{"/p"}, Mode: policy.Deny},
			{IsDetected: true, Deny: []string{policy.BPF, policy.AnyTrace}, Trust: policy.Trust{Programs: policy.Programs("/q")}, Mode: policy.Deny},
			{IsUpdaters: true, Trust: policy.Trust{Programs: policy.Programs("/u")}, Mode: policy.Audit},
		}, map[string]Masks{
			policy.Read: {Denied: 1, Only: 1}, policy.BPF: {Denied: 2}, policy.AnyTrace: {Denied: 2}, WriteProgram: {Denied: 2, Audited: 4}, Trace: {Denied: 2, Audited: 4},
		}},
	} {
		if got := MasksOf(c.rules); !maps.Equal(got, c.want) {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}
