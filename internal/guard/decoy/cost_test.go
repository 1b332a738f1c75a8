package decoy

import (
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// BenchmarkOpen measures the time that another process waits for an open of a decoy, and of a file
// beside it.
func BenchmarkOpen(b *testing.B) {
	s := newStand(b, rule.Stop)
	one := ""
	for _, d := range s.watch.inodes {
		one = d.Path
	}
	for name, path := range map[string]string{"decoy": one, "beside": s.files[0]} {
		b.Run(name, func(b *testing.B) {
			c := exec.Command("/proc/self/exe")
			c.Env = append(c.Environ(), doing+"=open - "+strconv.Itoa(b.N)+" "+path)
			out, err := c.CombinedOutput()
			ns, bad := strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
			if err != nil || bad != nil {
				b.Fatal(err, bad, string(out))
			}
			b.ReportMetric(ns, "ns/open")
		})
	}
}
