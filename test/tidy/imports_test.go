package tidy

import (
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/shunt-lb/shunt/"

// rooms says what of ours a package may import. The data goes
//
//	source ─► state ─► reconcile ─► datapath
//
// and reconcile names what it needs of the data plane as an interface (reconcile.Maps), so
// that datapath imports reconcile and not the other way round. A package that is not here
// is wiring, and may import what it likes.
var rooms = map[string][]string{
	"internal/model":       {},
	"internal/packet":      {},
	"internal/condition":   {"internal/model"},
	"internal/maglev":      {"internal/model"},
	"internal/state":       {"internal/model", "internal/condition", "internal/record"},
	"internal/source/file": {"internal/model", "internal/condition", "internal/maglev", "internal/state"},
	"internal/health":      {"internal/model"},
	"internal/reconcile":   {"internal/model", "internal/condition", "internal/maglev"},
	"internal/datapath":    {"internal/model", "internal/condition", "internal/maglev", "internal/namespace", "internal/reconcile"},
	"internal/namespace":   {},
	"internal/wire":        {"internal/namespace"},
	"internal/neighbour":   {"internal/model", "internal/condition", "internal/namespace", "internal/wire"},
	"internal/announce":    {"internal/model", "internal/condition", "internal/namespace", "internal/wire"},
	"internal/way":         {"internal/model", "internal/condition", "internal/datapath", "internal/neighbour", "internal/reconcile"},
	"internal/missed":      {},
	"internal/offload":     {"internal/model", "internal/condition", "internal/namespace"},
	"internal/backend":     {"internal/model", "internal/condition", "internal/record"},
	"internal/record":      {},
}

// owners says who alone may import a library: the packages below these paths.
var owners = map[string][]string{
	"github.com/cilium/ebpf": {"internal/datapath/", "bench/", "test/"},
	"k8s.io/client-go":       {"internal/source/kube/"},
}

func TestImportsPointOneWay(t *testing.T) {
	check(t, func(s source) bool { return s.isGo() && !strings.HasSuffix(s.path, "_test.go") }, imports)
}

func TestRoomsExist(t *testing.T) {
	files := tree(t)
	for room := range rooms {
		if !slices.ContainsFunc(files, func(s source) bool { return strings.HasPrefix(s.path, room+"/") && s.isGo() }) {
			t.Errorf("the table of rooms names %s, which does not exist", room)
		}
	}
}

func imports(s source) (found []violation) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, s.path, s.text, parser.ImportsOnly)
	if err != nil {
		return []violation{s.at(1, "not valid Go: %v", err)}
	}
	room := s.path[:strings.LastIndex("/"+s.path, "/")]
	room = strings.TrimSuffix(room, "/")
	allowed, isRoom := rooms[room]
	for _, spec := range file.Imports {
		line := files.Position(spec.Pos()).Line
		imported, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue
		}
		if ours, is := strings.CutPrefix(imported, module); is && isRoom && !slices.Contains(allowed, ours) {
			found = append(found, s.at(line, "%s must not import %s", room, ours))
		}
		for library, rooms := range owners {
			if imported != library && !strings.HasPrefix(imported, library+"/") {
				continue
			}
			if !slices.ContainsFunc(rooms, func(owner string) bool { return strings.HasPrefix(s.path, owner) }) {
				found = append(found, s.at(line, "only packages below %s may import %s", strings.Join(rooms, ", "), imported))
			}
		}
	}
	return found
}

func TestImportRuleFindsWhatItLooksFor(t *testing.T) {
	finds(t, imports, source{"internal/model/a.go", "package model\nimport \"" + module + "internal/state\"\n"}, 2)
	finds(t, imports, source{"internal/reconcile/a.go", "package reconcile\nimport \"" + module + "internal/datapath\"\n"}, 2)
	finds(t, imports, source{"internal/reconcile/a.go", "package reconcile\nimport \"" + module + "internal/model\"\n"})
	finds(t, imports, source{"internal/cli/a.go", "package cli\nimport \"github.com/cilium/ebpf/link\"\n"}, 2)
	finds(t, imports, source{"internal/datapath/a.go", "package datapath\nimport \"github.com/cilium/ebpf/link\"\n"})
	finds(t, imports, source{"internal/state/a.go", "package state\nimport \"k8s.io/client-go/rest\"\n"}, 2)
}
