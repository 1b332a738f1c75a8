package tidy

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/condition"
	all "github.com/shunt-lb/shunt/internal/products"
)

// TestReasonsAreDocumented reads the one list of reasons and expects each in the reference.
func TestReasonsAreDocumented(t *testing.T) {
	header := read(t, "bpf/core/reasons.h")
	page := read(t, "docs/reference/reasons.md")
	names := reasons(header)
	if len(names) < 30 {
		t.Fatalf("found only %d reasons in bpf/core/reasons.h", len(names))
	}
	for _, name := range names {
		if !strings.Contains(page, "`"+name+"`") {
			t.Errorf("docs/reference/reasons.md does not explain `%s`; is it generated from bpf/core/reasons.h?", name)
		}
	}
}

// TestConditionsAreTested expects a test for each condition: one that checks for it by its name, in Go or in JSON,
// outside the packages that list them all.
func TestConditionsAreTested(t *testing.T) {
	constants := map[string]string{} // by code
	for _, m := range conditionCode.FindAllStringSubmatch(read(t, "internal/condition/codes.go"), -1) {
		constants[m[2]] = m[1]
	}
	if len(constants) != len(condition.Codes) {
		t.Fatalf("found %d constants in internal/condition/codes.go, and there are %d codes", len(constants), len(condition.Codes))
	}
	tested := map[string]bool{}
	for _, s := range tree(t) {
		if !strings.HasSuffix(s.path, "_test.go") || strings.HasPrefix(s.path, "internal/condition/") || strings.HasPrefix(s.path, "test/tidy/") {
			continue
		}
		for code, constant := range constants {
			tested[code] = tested[code] || strings.Contains(s.text, `"`+code+`"`) || strings.Contains(s.text, "condition."+constant)
		}
	}
	for _, c := range condition.Codes {
		if !tested[c.Code] {
			t.Errorf("no test has the condition %s raised", c.Code)
		}
	}
}

var conditionCode = regexp.MustCompile(`(?m)^\t(\w+) += "(\w+)"$`)

var enumerator = regexp.MustCompile(`(?m)^\s*REASON_(\w+)\s*=\s*\d+,`)

// reasons is the words of enum reason, without the two that no packet has.
func reasons(header string) (names []string) {
	for _, m := range enumerator.FindAllStringSubmatch(header, -1) {
		if m[1] != "NONE" && m[1] != "COUNT" {
			names = append(names, strings.ToLower(m[1]))
		}
	}
	return names
}

// TestShownConfigurationIsValid gives every YAML block of the README, and the example
// file, to the parser that `shunt check` uses.
func TestShownConfigurationIsValid(t *testing.T) {
	blocks := yamlBlocks(read(t, "README.md"))
	if len(blocks) == 0 {
		t.Error("README.md shows no configuration")
	}
	example := read(t, "docs/guide/example.yaml")
	for _, text := range append(blocks, example) {
		name := filepath.Join(t.TempDir(), "shown.yaml")
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		read, err := all.Format().Read(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range read.Faults.Sorted() {
			t.Errorf("%v\nin:\n%s", f, text)
		}
	}
	if len(blocks) > 0 && strings.TrimSpace(withoutComments(blocks[0])) != strings.TrimSpace(withoutComments(example)) {
		t.Error("the first configuration of README.md is not docs/guide/example.yaml")
	}
}

var fence = regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$")

func yamlBlocks(markdown string) (blocks []string) {
	for _, m := range fence.FindAllStringSubmatch(markdown, -1) {
		blocks = append(blocks, m[1])
	}
	return blocks
}

var comment = regexp.MustCompile(`(?m)\s*(^|\s)#.*$`)

func withoutComments(yaml string) string {
	return comment.ReplaceAllString(yaml, "")
}

// TestLinksLeadSomewhere follows the links between the documents.
func TestLinksLeadSomewhere(t *testing.T) {
	check(t, func(s source) bool { return strings.HasSuffix(s.path, ".md") }, deadLinks)
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

func deadLinks(s source) (found []violation) {
	for i, line := range s.lines() {
		for _, m := range link.FindAllStringSubmatch(line, -1) {
			target, _, _ := strings.Cut(m[1], "#")
			if target == "" || strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			if _, err := os.Stat(filepath.Join(root, filepath.Dir(s.path), target)); err != nil {
				found = append(found, s.at(i+1, "the link to %s leads nowhere", target))
			}
		}
	}
	return found
}

// TestDecisionsAreListed compares the titles of docs/design with its index. An empty page does not fit either.
func TestDecisionsAreListed(t *testing.T) {
	index := read(t, "docs/design/README.md")
	check(t, func(s source) bool {
		return path.Dir(s.path) == "docs/design" && path.Base(s.path) != "README.md"
	}, func(s source) []violation { return unlisted(s, index) })
}

var decision = regexp.MustCompile(`^# (\d+\. )(.+)$`)

func unlisted(s source, index string) []violation {
	m := decision.FindStringSubmatch(s.lines()[0])
	if m == nil {
		return []violation{s.at(1, "a decision begins with \"# NUMBER. TITLE\"")}
	}
	if line := m[1] + "[" + m[2] + "](" + path.Base(s.path) + ")"; !slices.Contains(strings.Split(index, "\n"), line) {
		return []violation{s.at(1, "docs/design/README.md has no line %q", line)}
	}
	return nil
}

// TestGoVersionIsTold compares the README with go.mod.
func TestGoVersionIsTold(t *testing.T) {
	m := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(read(t, "go.mod"))
	if m == nil {
		t.Fatal("go.mod names no version of Go")
	}
	if !strings.Contains(read(t, "README.md"), "Go "+m[1]) {
		t.Errorf("README.md does not say that Go %s is needed", m[1])
	}
}

func TestDocumentRulesFindWhatTheyLookFor(t *testing.T) {
	finds(t, deadLinks, source{"README.md", "[a](no/such/file.md)\n[b](https://example.org/)\n[c](go.mod)\n"}, 1)
	finds(t, func(s source) []violation { return unlisted(s, "1. [A](01-a.md)\n") }, source{"docs/design/01-a.md", ""}, 1)
	finds(t, func(s source) []violation { return unlisted(s, "1. [A](01-a.md)\n") }, source{"docs/design/01-a.md", "# 1. B\n"}, 1)
	finds(t, func(s source) []violation { return unlisted(s, "1. [A](01-a.md)\n") }, source{"docs/design/01-a.md", "# 1. A\n"})
	if got := reasons("\tREASON_NONE = 0,\n\tREASON_NOT_IP = 1, /* pass */\n\tREASON_COUNT = 128,\n"); len(got) != 1 || got[0] != "not_ip" {
		t.Errorf("reasons: %v", got)
	}
	if got := yamlBlocks("```yaml\na: 1\n```\n\n```\nb\n```\n"); len(got) != 1 || got[0] != "a: 1\n" {
		t.Errorf("yamlBlocks: %q", got)
	}
	if got := withoutComments("a: 1   # why\nb: \"#2\"\n"); got != "a: 1\nb: \"#2\"\n" {
		t.Errorf("withoutComments: %q", got)
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
