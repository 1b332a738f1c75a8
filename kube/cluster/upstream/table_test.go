package main

import (
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/kube/cluster"
)

func specs(status ...string) (all []cluster.Spec) {
	for i := 0; i < len(status); i += 2 {
		all = append(all, cluster.Spec{Name: "[sig-network] " + status[i], Status: status[i+1]})
	}
	return all
}

func TestTable(t *testing.T) {
	rows := compare(specs("Services b", "passed", "Services a|c", "failed", "DNS d", "passed", "Services after restarting [Disruptive]", "skipped"),
		specs("Services a|c", "passed", "Services b", "passed", "Services after restarting [Disruptive]", "skipped"))
	text := draw(rows)
	for _, want := range []string{"| a\\|c | failed | passed |  |\n", "| b | passed | passed |  |\n", "| after restarting [Disruptive] | not asked | not asked | restarts",
		"3 tests, of which 2 are asked for: kube-proxy passes 1, shunt-kube 2.\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if strings.Contains(text, "DNS") {
		t.Errorf("tests of other things are in\n%s", text)
	}
	if err := verdict(rows); err != nil {
		t.Error(err)
	}
}

// TestHowATestEnded: a test that skips itself, because it cannot run in such a cluster, is told apart from one that
// nobody asked for.
func TestHowATestEnded(t *testing.T) {
	for _, c := range []struct{ status, message, want string }{
		{"passed", "", "passed"}, {"failed", "", "failed"}, {"interrupted", "", notRun},
		{"skipped", "skipped", notRun}, {"skipped", "skipped - needs two zones", "skipped"},
	} {
		s := cluster.Spec{Status: c.status}
		s.Skipped.Message = c.message
		if got := ended(s); got != c.want {
			t.Errorf("%s %q: %s, want %s", c.status, c.message, got, c.want)
		}
	}
}

// TestVerdict: a test that only kube-proxy passes is a fault, and so is one that shunt-kube never ran.
func TestVerdict(t *testing.T) {
	for _, ours := range [][]cluster.Spec{specs("Services a", "failed"), nil} {
		if err := verdict(compare(specs("Services a", "passed"), ours)); err == nil || !strings.Contains(err.Error(), "Services a") {
			t.Errorf("%v: %v", ours, err)
		}
	}
	if err := verdict(nil); err == nil {
		t.Error("no test at all is success")
	}
}
