package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/kube/cluster"
)

// services matches the names of all tests in the table.
const services = `\[sig-network\] Services `

// notAsked are tests that no balancer is asked to pass here, by name, with the reason.
var notAsked = []struct{ name, why string }{
	{`\[Disruptive\]`, "restarts components of nodes over SSH, which these nodes do not have"},
}

func skip() string {
	var names []string
	for _, n := range notAsked {
		names = append(names, n.name)
	}
	return strings.Join(names, "|")
}

// row is a test with both results.
type row struct{ name, theirs, ours, why string }

// compare pairs the tests of Services by name.
func compare(theirs, ours []cluster.Spec) (rows []row) {
	status := map[string]string{}
	for _, s := range ours {
		status[s.Name] = ended(s)
	}
	for _, s := range theirs {
		if !strings.HasPrefix(s.Name, "[sig-network] Services ") {
			continue
		}
		r := row{name: s.Name, theirs: ended(s), ours: status[s.Name], why: why(s.Name)}
		if r.why != "" {
			r.theirs, r.ours = "not asked", "not asked"
		}
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(a, b row) int { return strings.Compare(a.name, b.name) })
	return rows
}

// notRun is the result of a test that has not begun, or that the end of the run has interrupted.
const notRun = "not run"

func ended(s cluster.Spec) string {
	if s.Status == "skipped" && s.Skipped.Message == "skipped" || s.Status == "interrupted" {
		return notRun
	}
	return s.Status
}

func why(name string) string {
	for _, n := range notAsked {
		if regexp.MustCompile(n.name).MatchString(name) {
			return n.why
		}
	}
	return ""
}

const head = `# Kubernetes' own tests of Services

Written by ` + "`make test-kube-e2e`" + `: the tests "[sig-network] Services" of Kubernetes' sources, one after the other, in the same cluster of three nodes, first with
shunt-kube, then with kube-proxy in mode nftables. No test is repeated after it failed. "Not run": the run was for some of the tests, or ended before this one.

| Test | kube-proxy | shunt-kube | Why |
|---|---|---|---|
`

// draw returns the table as Markdown, with the sum of each column.
func draw(rows []row) string {
	var text strings.Builder
	text.WriteString(head)
	theirs, ours, asked := 0, 0, 0
	for _, r := range rows {
		name := strings.TrimPrefix(r.name, "[sig-network] Services ")
		fmt.Fprintf(&text, "| %s | %s | %s | %s |\n", strings.ReplaceAll(name, "|", `\|`), r.theirs, r.ours, r.why)
		if r.theirs == "passed" {
			theirs++
		}
		if r.ours == "passed" {
			ours++
		}
		if r.why == "" {
			asked++
		}
	}
	fmt.Fprintf(&text, "\n%d tests, of which %d are asked for: kube-proxy passes %d, shunt-kube %d.\n", len(rows), asked, theirs, ours)
	return text.String()
}

// verdict returns an error if a test passes only with kube-proxy, or if none passes.
func verdict(rows []row) error {
	var worse []string
	passed := 0
	for _, r := range rows {
		if r.theirs != "passed" {
			continue
		}
		passed++
		if r.ours != "passed" {
			worse = append(worse, r.name)
		}
	}
	if passed == 0 {
		return fmt.Errorf("no test passes with kube-proxy: the cluster or --focus is wrong")
	}
	if len(worse) > 0 {
		return fmt.Errorf("%d tests pass with kube-proxy and not with shunt-kube:\n%s", len(worse), strings.Join(worse, "\n"))
	}
	return nil
}
