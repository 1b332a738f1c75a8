package baseline

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the list of items into the guide")

// The guide's list of items is made from the template.
func TestGuideListsTheItems(t *testing.T) {
	const page, begin, end = "../../../docs/guide/baseline.md", "<!-- items: made by go test ./internal/guard/baseline -update -->\n", "<!-- end of items -->\n"
	var b strings.Builder
	for _, section := range Sections {
		fmt.Fprintf(&b, "\n### %s\n\n| item | what it asks | clause | repaired by |\n|---|---|---|---|\n", section.Title)
		for _, i := range debianItems(t) {
			if i.Section != section.Word {
				continue
			}
			by := "`fix`"
			if !i.Repairs() {
				by = "a person"
			}
			fmt.Fprintf(&b, "| `%s` | %s: %s | %s | %s |\n", i.ID, i.Title, strings.ReplaceAll(i.Wanted(), "|", "\\|"), i.Clause, by)
		}
	}
	b.WriteString("\n")
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), begin)
	have, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s has no place for the items", page)
	}
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+b.String()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if have != b.String() {
		t.Errorf("%s does not list the items as they are: run go test ./internal/guard/baseline -update", page)
	}
}
