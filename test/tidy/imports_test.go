package tidy

import (
	"go/parser"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/shunt-lb/shunt/"

// mayImport lists the packages of shunt that a package may import. The floor is shared by all products; in the
// balancer the data goes
//
//	source ─► state ─► reconcile ─► datapath
//
// and reconcile names its needs of the data plane as an interface (reconcile.Maps), so that datapath imports
// reconcile and not the other way round. A package that is not here may import everything but another product's
// packages, and a package of the floor none of a product's.
var mayImport = map[string][]string{
	// The floor.
	"internal/cgroup":      {},
	"internal/cli":         {"api/v1", "internal/config", "internal/control", "internal/node", "internal/start", "internal/story", "internal/value"},
	"internal/cli/tool":    {"internal/cli", "sensor"},
	"internal/condition":   {},
	"internal/control":     {"api/v1", "api/v1/shuntv1connect", "internal/condition", "internal/host", "internal/message", "internal/settings"},
	"internal/config":      {"internal/value"},
	"internal/event":       {},
	"internal/event/storm": {},
	"internal/host":        {},
	"internal/kernel":      {"internal/host", "internal/namespace", "internal/process"},
	"internal/machine":     {},
	"internal/message":     {"api/v1", "internal/condition", "internal/config", "internal/value"},
	"internal/node": {"api/v1", "internal/condition", "internal/config", "internal/control", "internal/message", "internal/metrics", "internal/record",
		"internal/settings", "internal/value"},
	"internal/settings":  {"internal/config", "internal/value"},
	"internal/metrics":   {},
	"internal/missed":    {},
	"internal/namespace": {},
	"internal/offload":   {"internal/condition", "internal/namespace"},
	"internal/packet":    {},
	"internal/process":   {},
	"internal/record":    {"internal/process"},
	"sensor":             {"internal/kernel"},

	// The balancer.
	"internal/lb/model":            {"internal/value"},
	"internal/lb/maglev":           {"internal/lb/model"},
	"internal/lb/state":            {"internal/lb/model", "internal/condition", "internal/record"},
	"internal/lb/source/file":      {"internal/lb/model", "internal/value", "internal/condition", "internal/config", "internal/settings", "internal/lb/maglev", "internal/lb/state"},
	"internal/lb/health":           {"internal/lb/model"},
	"internal/lb/detour":           {"internal/lb/model", "internal/host", "internal/lb/realserver"},
	"internal/lb/resolve":          {"internal/lb/model", "internal/condition", "internal/record"},
	"internal/lb/reconcile":        {"internal/lb/model", "internal/value", "internal/condition", "internal/lb/maglev"},
	"internal/lb/decap":            {"internal/lb/model", "internal/host", "internal/kernel", "internal/lb/realserver"},
	"internal/lb/datapath":         {"internal/kernel", "internal/lb/datapath/attach", "internal/lb/datapath/store", "internal/lb/datapath/upgrade"},
	"internal/lb/datapath/abi":     {"internal/lb/model", "internal/value", "internal/kernel", "internal/lb/reconcile"},
	"internal/lb/datapath/attach":  {"internal/host", "internal/kernel", "internal/lb/datapath/abi", "internal/lb/datapath/store", "internal/lb/model"},
	"internal/lb/datapath/bed":     {"internal/kernel", "internal/lb/model", "internal/lb/reconcile", "internal/namespace", "internal/value"},
	"internal/lb/datapath/store":   {"internal/lb/model", "internal/value", "internal/kernel", "internal/lb/reconcile", "internal/lb/datapath/abi"},
	"internal/lb/datapath/upgrade": {"internal/kernel", "internal/lb/datapath/abi", "internal/lb/datapath/attach", "internal/lb/datapath/store"},
	"internal/lb/sock":             {"internal/host", "internal/kernel", "internal/namespace", "internal/lb/reconcile"},
	"internal/lb/wire":             {"internal/namespace", "internal/packet"},
	"internal/lb/neighbour":        {"internal/lb/model", "internal/condition", "internal/namespace", "internal/lb/wire"},
	"internal/lb/announce":         {"internal/lb/model", "internal/condition", "internal/namespace", "internal/packet", "internal/lb/wire"},
	"internal/lb/route":            {"internal/lb/model", "internal/condition", "internal/lb/datapath/store", "internal/lb/neighbour", "internal/lb/reconcile"},
	"internal/lb/realserver":       {"internal/lb/model", "internal/condition", "internal/host", "internal/record"},

	// The UDP path.
	"internal/udp/xsk":    {},
	"internal/udp/proto":  {"internal/udp/xsk"},
	"internal/udp/hook":   {"internal/kernel"},
	"internal/udp/lease":  {"internal/kernel", "internal/udp/hook", "internal/udp/xsk"},
	"internal/udp/broker": {"internal/host", "internal/kernel", "internal/process", "internal/record", "internal/udp/hook", "internal/udp/lease", "internal/udp/proto", "internal/udp/xsk"},
	"internal/udp/daemon": {"api/v1", "internal/condition", "internal/config", "internal/kernel", "internal/metrics", "internal/node", "internal/value", "internal/udp/broker",
		"internal/udp/hook", "internal/udp/lease", "internal/udp/proto", "internal/udp/tuning", "internal/udp/xsk"},
	"internal/udp/tuning": {"internal/record"},
	"internal/udp/doctor": {"internal/kernel"},
	"udp":                 {"internal/udp/proto", "internal/udp/xsk"},

	// Diagnosis.
	"internal/diag":         {"internal/diag/io", "internal/diag/memleak", "internal/diag/ping", "internal/diag/sched", "internal/diag/vdisk", "sensor"},
	"internal/diag/io":      {"internal/cgroup", "internal/diag/lasting", "internal/diag/line", "internal/diag/symbol", "internal/event", "sensor"},
	"internal/diag/lasting": {},
	"internal/diag/line":    {"sensor"},
	"internal/diag/memleak": {"internal/cgroup", "internal/diag/lasting", "internal/diag/line", "internal/diag/symbol", "internal/event", "sensor"},
	"internal/diag/ping":    {"internal/diag/lasting", "internal/host", "internal/diag/line", "internal/kernel", "sensor"},
	"internal/diag/sched":   {"internal/cgroup", "internal/diag/lasting", "internal/diag/line", "internal/diag/symbol", "internal/event", "sensor"},
	"internal/diag/symbol":  {"internal/event"},
	"internal/diag/top":     {"internal/diag/io", "internal/diag/lasting", "internal/diag/line", "internal/diag/memleak", "internal/diag/sched", "internal/event", "sensor"},
	"internal/diag/vdisk":   {"internal/config", "internal/diag/io", "internal/diag/lasting", "internal/diag/line", "internal/diag/symbol", "internal/event", "internal/process", "sensor"},

	// The pod shortcuts.
	"internal/pod/compare": {"internal/pod/traffic"},
	"internal/pod/daemon": {"api/v1", "internal/cgroup", "internal/condition", "internal/config", "internal/host", "internal/kernel", "internal/metrics",
		"internal/node", "internal/value", "internal/pod/shortcut", "internal/pod/sockets", "internal/pod/watch"},
	"internal/pod/plain":    {},
	"internal/pod/rules":    {},
	"internal/pod/shortcut": {"internal/host", "internal/kernel"},
	"internal/pod/sockets":  {"internal/kernel", "internal/value"},
	"internal/pod/traffic":  {},
	"internal/pod/watch":    {"internal/kernel", "internal/pod/rules", "internal/pod/shortcut"},

	// The guard.
	"internal/guard/agent":    {"internal/cgroup", "internal/event", "internal/host", "internal/guard/connect", "internal/guard/decoy", "internal/guard/detect", "internal/guard/gate", "internal/guard/judge", "internal/guard/policy", "internal/guard/protect", "internal/guard/rule", "internal/kernel", "sensor"},
	"internal/guard/baseline": {"internal/config", "internal/record"},
	"internal/guard/connect":  {"internal/cgroup", "internal/event", "internal/guard/policy", "internal/kernel", "internal/process"},
	"internal/guard/decoy":    {"internal/guard/detect", "internal/guard/fanotify", "internal/guard/policy", "internal/guard/rule", "internal/process", "internal/record"},
	"internal/guard/rule":     {"internal/config"},
	"internal/guard/policy":   {"internal/config", "internal/guard/rule"},
	"internal/guard/detect":   {"internal/cgroup", "internal/event", "internal/guard/policy", "internal/guard/rule", "internal/process", "internal/value", "sensor"},
	"internal/guard/judge":    {"internal/event", "internal/guard/policy", "internal/host", "internal/process"},
	"internal/guard/gate":     {"internal/cgroup", "internal/guard/fanotify", "internal/guard/judge", "internal/guard/policy", "internal/record"},
	"internal/guard/protect":  {"internal/event", "internal/guard/judge", "internal/guard/policy", "internal/kernel", "internal/process"},
	"internal/guard/trial":    {"internal/guard/judge", "internal/guard/policy", "test/uring"},
	"internal/guard/suggest":  {"internal/event", "internal/guard/connect", "internal/guard/judge", "internal/guard/policy", "internal/value"},
}

// products are the folders of internal/ that are a product each. None imports another's.
var products = []string{"lb", "udp", "diag", "pod", "guard"}

// wiring are the packages that put all products together.
var wiring = []string{"internal/commands", "internal/products"}

// of is the product that a package belongs to; "" for the floor, and for wiring.
func of(name string) string {
	folder, _, _ := strings.Cut(strings.TrimPrefix(name, "internal/"), "/")
	if strings.HasPrefix(name, "internal/") && slices.Contains(products, folder) {
		return folder
	}
	return ""
}

// owners are the only packages that may import a library: the ones below these paths.
var owners = map[string][]string{
	"github.com/cilium/ebpf": {"sensor/", "internal/event/", "internal/kernel/", "internal/lb/datapath/", "internal/lb/decap/", "internal/lb/sock/",
		"internal/udp/hook/", "internal/diag/", "internal/pod/shortcut/", "internal/pod/sockets/", "internal/guard/connect/", "internal/guard/detect/", "internal/guard/protect/", "internal/guard/trial/", "bench/", "test/"},
	"github.com/prometheus/client_golang": {"internal/metrics/", "kube/"},
	"github.com/miekg/dns":                {"internal/lb/resolve/", "test/"},
	"k8s.io/client-go":                    {"kube/"},
	"github.com/google/nftables":          {"internal/pod/plain/", "kube/hold/", "kube/rival/"},
}

func TestImportsPointOneWay(t *testing.T) {
	check(t, func(s source) bool { return s.isGo() && !strings.HasSuffix(s.path, "_test.go") }, imports)
}

// mayInclude lists the folders of bpf/ that the files of a folder may include, besides their own. A folder is a
// product's, except core, which all products use, and ctx, the frame at a hook: only the file of a hook
// includes that one.
var mayInclude = map[string][]string{
	"core":  {},
	"ctx":   {},
	"event": {},
	"lb":    {"core"},
	"udp":   {"core"},
	"diag":  {"core", "event"},
	"pod":   {"core"},
	"guard": {"event"},
}

func TestIncludesPointOneWay(t *testing.T) {
	check(t, source.isBPF, includes)
}

var include = regexp.MustCompile(`^#include "([a-z0-9_/.]+\.h)"`)

func includes(s source) (found []violation) {
	folder := product(s.path)
	allowed, known := mayInclude[folder]
	if !known {
		return []violation{s.at(1, "bpf/%s is none of the folders of bpf", folder)}
	}
	if strings.HasSuffix(s.path, ".bpf.c") {
		allowed = append(slices.Clone(allowed), "ctx")
	}
	for i, line := range strings.Split(s.text, "\n") {
		if m := include.FindStringSubmatch(line); m != nil {
			if to := product(path.Join(path.Dir(s.path), m[1])); to != folder && !slices.Contains(allowed, to) {
				found = append(found, s.at(i+1, "%s must not include bpf/%s", s.path, to))
			}
		}
		if folder == "core" && strings.Contains(line, `SEC(".maps")`) {
			found = append(found, s.at(i+1, "bpf/core has no maps: every product may use it"))
		}
	}
	return found
}

// product is the first folder of a path below bpf/: the file's product.
func product(path string) string {
	folder, _, _ := strings.Cut(strings.TrimPrefix(path, "bpf/"), "/")
	return folder
}

func TestIncludeRuleFindsWhatItLooksFor(t *testing.T) {
	finds(t, includes, source{"bpf/core/a.h", "#include \"b.h\"\n#include \"../lb/c.h\"\n} sh_x SEC(\".maps\");\n"}, 2, 3)
	finds(t, includes, source{"bpf/lb/decap/a.h", "#include \"../../core/b.h\"\n#include \"../c.h\"\n#include \"../../ctx/c.h\"\n"}, 3)
	finds(t, includes, source{"bpf/lb/a.h", "#include <linux/bpf.h>\n#include \"../core/b.h\"\n#include \"c.h\"\n"})
	finds(t, includes, source{"bpf/lb/a.bpf.c", "#include \"../ctx/b.h\"\n#include \"c.h\"\n"})
	finds(t, includes, source{"bpf/lib/a.h", "\n"}, 1)
	finds(t, includes, source{"bpf/a.h", "\n"}, 1)
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
		} else if is && of(own) != "" && of(ours) != "" && of(own) != of(ours) {
			found = append(found, s.at(line, "%s is the product %s, and must not import %s, which is another's", own, of(own), ours))
		} else if is && of(own) == "" && of(ours) != "" && strings.HasPrefix(own, "internal/") && !slices.Contains(wiring, own) {
			found = append(found, s.at(line, "%s is the floor of all products, and must not import %s, which is one's", own, ours))
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
	finds(t, imports, source{"internal/lb/model/a.go", "package model\nimport \"" + module + "internal/lb/state\"\n"}, 2)
	finds(t, imports, source{"internal/lb/reconcile/a.go", "package reconcile\nimport \"" + module + "internal/lb/datapath\"\n"}, 2)
	finds(t, imports, source{"internal/lb/reconcile/a.go", "package reconcile\nimport \"" + module + "internal/lb/model\"\n"})
	finds(t, imports, source{"internal/udp/demo/a.go", "package demo\nimport (\n\"" + module + "internal/lb/demo\"\n\"" + module + "internal/lab\"\n)\n"}, 3)
	finds(t, imports, source{"internal/guard/command/a.go", "package command\nimport \"" + module + "internal/lb/daemon\"\nimport \"" + module + "internal/cli\"\n"}, 2)
	finds(t, imports, source{"internal/cli/a.go", "package cli\nimport \"" + module + "internal/lb/command\"\n"}, 2)
	finds(t, imports, source{"internal/story/a.go", "package story\nimport \"" + module + "internal/lb/model\"\n"}, 2)
	finds(t, imports, source{"internal/products/a.go", "package products\nimport \"" + module + "internal/lb/model\"\n"})
	finds(t, imports, source{"internal/cli/a.go", "package cli\nimport \"github.com/cilium/ebpf/link\"\n"}, 2)
	finds(t, imports, source{"internal/lb/datapath/a.go", "package datapath\nimport \"github.com/cilium/ebpf/link\"\n"})
	finds(t, imports, source{"internal/lb/state/a.go", "package state\nimport \"k8s.io/client-go/rest\"\n"}, 2)
}
