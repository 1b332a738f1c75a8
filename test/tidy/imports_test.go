package tidy

import (
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/shunt-lb/shunt/"

// mayImport says which packages of shunt a package may import. The data goes
//
//	source ─► state ─► reconcile ─► datapath
//
// and reconcile names what it needs of the data plane as an interface (reconcile.Maps), so
// that datapath imports reconcile and not the other way round. A package that is not here
// is wiring, and may import what it likes.
var mayImport = map[string][]string{
	"internal/model":       {},
	"internal/packet":      {},
	"internal/condition":   {"internal/model"},
	"internal/maglev":      {"internal/model"},
	"internal/state":       {"internal/model", "internal/condition", "internal/record"},
	"internal/config":      {"internal/model"},
	"internal/source/file": {"internal/model", "internal/condition", "internal/config", "internal/maglev", "internal/state"},
	"internal/health":      {"internal/model"},
	"internal/detour":      {"internal/model", "internal/backend"},
	"internal/resolve":     {"internal/model", "internal/condition", "internal/record"},
	"internal/reconcile":   {"internal/model", "internal/condition", "internal/maglev"},
	"internal/kernel":      {"internal/model"},
	"internal/decap":       {"internal/model", "internal/kernel", "internal/backend"},
	"internal/datapath":    {"internal/model", "internal/kernel", "internal/condition", "internal/maglev", "internal/namespace", "internal/reconcile"},
	"internal/namespace":   {},
	"internal/wire":        {"internal/namespace"},
	"internal/neighbour":   {"internal/model", "internal/condition", "internal/namespace", "internal/wire"},
	"internal/announce":    {"internal/model", "internal/condition", "internal/namespace", "internal/wire"},
	"internal/way":         {"internal/model", "internal/condition", "internal/datapath", "internal/neighbour", "internal/reconcile"},
	"internal/missed":      {},
	"internal/metrics":     {},
	"internal/offload":     {"internal/model", "internal/condition", "internal/namespace"},
	"internal/backend":     {"internal/model", "internal/condition", "internal/record"},
	"internal/record":      {},
	"sensor":               {},
	"internal/event":       {},
	"internal/event/storm": {},
	"internal/diag/io":     {"internal/event", "sensor"},
	"internal/diag":        {"internal/diag/io", "sensor"},
}

// owners says who alone may import a library: the packages below these paths.
var owners = map[string][]string{
	"github.com/cilium/ebpf":              {"internal/kernel/", "internal/datapath/", "internal/decap/", "sensor/", "internal/event/", "internal/diag/", "bench/", "test/"},
	"github.com/prometheus/client_golang": {"internal/metrics/"},
	"github.com/miekg/dns":                {"internal/resolve/", "test/"},
	"k8s.io/client-go":                    {"internal/source/kube/"},
}

func TestImportsPointOneWay(t *testing.T) {
	check(t, func(s source) bool { return s.isGo() && !strings.HasSuffix(s.path, "_test.go") }, imports)
}

// mayInclude says which folders of bpf/ a header may include, beside its own. The file of a hook may
// include all: it puts together the frame (ctx) and the stages.
var mayInclude = map[string][]string{
	"core":  {},
	"ctx":   {},
	"lb":    {"core"},
	"decap": {"core"},
	"event": {},
	"diag":  {"event"},
}

func TestIncludesPointOneWay(t *testing.T) {
	check(t, func(s source) bool { return strings.HasPrefix(s.path, "bpf/") && strings.HasSuffix(s.path, ".h") }, includes)
}

var include = regexp.MustCompile(`^#include "(?:\.\./([a-z]+)/)?[a-z0-9_]+\.h"`)

func includes(s source) (found []violation) {
	folder := strings.Split(s.path, "/")[1]
	allowed, known := mayInclude[folder]
	if !known {
		return []violation{s.at(1, "bpf/%s is none of the folders for headers", folder)}
	}
	for i, line := range strings.Split(s.text, "\n") {
		if m := include.FindStringSubmatch(line); m != nil && m[1] != "" && !slices.Contains(allowed, m[1]) {
			found = append(found, s.at(i+1, "bpf/%s must not include bpf/%s", folder, m[1]))
		}
		if folder == "core" && strings.Contains(line, `SEC(".maps")`) {
			found = append(found, s.at(i+1, "bpf/core has no maps: every product may use it"))
		}
	}
	return found
}

func TestIncludeRuleFindsWhatItLooksFor(t *testing.T) {
	finds(t, includes, source{"bpf/core/a.h", "#include \"b.h\"\n#include \"../lb/c.h\"\n} sh_x SEC(\".maps\");\n"}, 2, 3)
	finds(t, includes, source{"bpf/decap/a.h", "#include \"../core/b.h\"\n#include \"../lb/c.h\"\n"}, 2)
	finds(t, includes, source{"bpf/lb/a.h", "#include <linux/bpf.h>\n#include \"../core/b.h\"\n#include \"c.h\"\n"})
	finds(t, includes, source{"bpf/lib/a.h", "\n"}, 1)
}

func TestPackagesOfTheTableExist(t *testing.T) {
	files := tree(t)
	for name := range mayImport {
		if !slices.ContainsFunc(files, func(s source) bool { return strings.HasPrefix(s.path, name+"/") && s.isGo() }) {
			t.Errorf("mayImport names %s, which does not exist", name)
		}
	}
}

func imports(s source) (found []violation) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, s.path, s.text, parser.ImportsOnly)
	if err != nil {
		return []violation{s.at(1, "not valid Go: %v", err)}
	}
	own := strings.TrimSuffix(s.path[:strings.LastIndex("/"+s.path, "/")], "/")
	allowed, limited := mayImport[own]
	for _, spec := range file.Imports {
		line := files.Position(spec.Pos()).Line
		imported, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue
		}
		if ours, is := strings.CutPrefix(imported, module); is && limited && !slices.Contains(allowed, ours) {
			found = append(found, s.at(line, "%s must not import %s", own, ours))
		}
		for library, folders := range owners {
			if imported != library && !strings.HasPrefix(imported, library+"/") {
				continue
			}
			if !slices.ContainsFunc(folders, func(owner string) bool { return strings.HasPrefix(s.path, owner) }) {
				found = append(found, s.at(line, "only packages below %s may import %s", strings.Join(folders, ", "), imported))
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
