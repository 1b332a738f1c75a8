package connect

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Security hooks are left for a cgroup only where the kernel refuses them, or would not ask there. Any other fault of a program is one.
func TestHooksThatAreRefused(t *testing.T) {
	refused := fmt.Errorf("load: %w", unix.EPERM)
	for _, c := range []struct {
		modules string
		loading error
		want    string // a part of why; "": they are not left
	}{
		{"lockdown,bpf", nil, ""},
		{"lockdown,bpf", refused, "does not say why (EPERM)"},
		{"lockdown,bpf", errors.New("the verifier refuses it"), ""},
		{"lockdown,capability", nil, "not among the kernel's active security modules (lockdown,capability)"},
		{"lockdown,bpfx", refused, "not among"},
		{"", nil, "mount -t securityfs"},
		{"", refused, "does not say why (EPERM)"},
		{"", errors.New("the verifier refuses it"), ""},
	} {
		if got := hooksRefuse(c.modules, c.loading); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%q, %v: %q, want %q", c.modules, c.loading, got, c.want)
		}
	}
}
