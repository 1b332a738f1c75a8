package baseline

import (
	"fmt"
	"strings"
	"unicode"
)

// The statuses of an item. The values are the words of the output.
const (
	Passes        = "passes"
	Fails         = "fails"
	NotApplicable = "not applicable"
	CannotTell    = "cannot tell"
)

// check is a demand on a system. repair only plans; its error has the advice for a person to do it instead.
type check interface {
	examine(t *tree) finding
	repair(t *tree) error
	wanted() string
}

// finding is the state of an item in a tree.
type finding struct{ status, found string }

func passes(format string, args ...any) finding { return finding{Passes, fmt.Sprintf(format, args...)} }
func fails(format string, args ...any) finding  { return finding{Fails, fmt.Sprintf(format, args...)} }
func notApplicable(format string, args ...any) finding {
	return finding{NotApplicable, fmt.Sprintf(format, args...)}
}
func unknown(err error) finding { return finding{CannotTell, err.Error()} }

// Item is one demand of a template.
type Item struct {
	ID      string
	Title   string
	Section string   // a word of Sections
	Clause  string   // of GB/T 22239-2019, without its name: 8.1.4.1 a
	Manual  []string // manual pages that describe the setting
	Needs   string   // a path without which the item is not applicable; or empty
	ByHand  string   // why it is not repaired, and the remedy by hand; empty: it is repaired
	check   check
}

// Sources names the sources of the item.
func (i Item) Sources() []string {
	return append([]string{"GB/T 22239-2019 " + i.Clause}, i.Manual...)
}

// Wanted describes the state that the item demands.
func (i Item) Wanted() string { return i.check.wanted() }

// Repairs reports whether Fix can change something for the item.
func (i Item) Repairs() bool {
	if i.ByHand != "" {
		return false
	}
	switch c := i.check.(type) {
	case *software:
		return false
	case *line:
		return c.Add != ""
	case *accounts:
		switch c.Rule {
		case ruleNoEmptyPassword, ruleSystemShells, ruleShadowGroup, ruleNoLegacy:
			return true
		}
		return false
	case *pam:
		return c.Add != "" || !c.needed()
	}
	return true
}

// Section is a part of the baseline.
type Section struct{ Word, Title, Clause string }

// Sections in the order of the standard's clauses.
var Sections = []Section{
	{"authentication", "Authentication", "8.1.4.1"},
	{"access", "Access control", "8.1.4.2"},
	{"audit", "Audit", "8.1.4.3"},
	{"intrusion", "Intrusion prevention", "8.1.4.4"},
	{"residual", "Residual information", "8.1.4.10"},
}

// Result is the result of one item.
type Result struct {
	ID       string   `json:"id"`
	Title    string   `json:"title"`
	Section  string   `json:"section"`
	Sources  []string `json:"sources"`
	Status   string   `json:"status"`
	Found    string   `json:"found"`
	Expected string   `json:"expected"`
	Remedy   string   `json:"remedy,omitempty"` // of one that fails
}

// examineItem examines an item in a tree, with the changes that are planned there.
func examineItem(t *tree, i *Item) finding {
	if i.Needs != "" {
		where, err := t.resolve(i.Needs)
		if err == nil {
			var s *state
			if s, err = t.at(where); err == nil && s == nil {
				return notApplicable("there is no %s", i.Needs)
			}
		}
		if err != nil {
			return unknown(err)
		}
	}
	f := i.check.examine(t)
	f.found = printable(f.found)
	return f
}

// printable returns text of the tree's files as a terminal can show it, at most 200 characters.
func printable(text string) string {
	runes := []rune(strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, text))
	if len(runes) > 200 {
		return string(runes[:200]) + "…"
	}
	return string(runes)
}

// Check examines the items in the system whose root is dir. It changes nothing, and runs no program of the tree. The
// error says that the root cannot be opened.
func Check(dir string, items []Item) ([]Result, error) {
	t, err := openTree(dir)
	if err != nil {
		return nil, err
	}
	defer t.Close() //nolint:errcheck // only read
	results := make([]Result, 0, len(items))
	for i := range items {
		item := &items[i]
		f := examineItem(t, item)
		r := Result{ID: item.ID, Title: item.Title, Section: item.Section, Sources: item.Sources(), Status: f.status, Found: f.found, Expected: item.Wanted()}
		if f.status == Fails {
			r.Remedy = remedy(t, item)
		}
		results = append(results, r)
	}
	return results, nil
}

// remedy describes the repair of an item that fails. Nothing stays planned.
func remedy(t *tree, i *Item) string {
	planned, order := t.plans()
	defer t.undoPlans(planned, order)
	if err := repairItem(t, i); err != nil {
		return "by hand: " + printable(err.Error())
	}
	if len(t.order) == len(order) {
		return "fix has nothing to change"
	}
	return "fix changes " + strings.Join(t.order[len(order):], ", ")
}

// repairItem plans the repair of an item. After an error nothing of it is planned.
func repairItem(t *tree, i *Item) error {
	if i.ByHand != "" {
		return fmt.Errorf("%s", i.ByHand)
	}
	planned, order := t.plans()
	err := i.check.repair(t)
	if err == nil {
		if f := examineItem(t, i); f.status != Passes {
			err = fmt.Errorf("the change that shunt knows does not help: %s would still be found", f.found)
		}
	}
	if err != nil {
		t.undoPlans(planned, order)
	}
	return err
}
