package detect

import (
	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// filtersFor returns the file names that rules on opens can hold for, for sh_d_names, and the kinds of opens that it covers: enum
// detect_filter. An open for which no rule can hold makes no event.
func filtersFor(o Options) (filters uint32, all []ebpf.MapKV) {
	if o.All {
		return 0, nil
	}
	reads, writes := rule.OpenNames(o.Rules)
	seen := map[detectDetectName]bool{}
	for _, of := range []struct {
		names   rule.Names
		filter  detectDetectFilter
		isWrite uint32
	}{{reads, detectDetectFilterDETECT_FILTER_READS, 0}, {writes, detectDetectFilterDETECT_FILTER_WRITES, 1}} {
		keys, ok := keysOf(of.names, of.isWrite)
		if !ok || len(seen)+len(keys) > int(detectDetectConstantDETECT_NAMES_MAX) {
			continue // all of these opens make events
		}
		filters |= uint32(of.filter)
		for _, key := range keys {
			if !seen[key] {
				seen[key] = true
				all = append(all, ebpf.MapKV{Key: key, Value: uint32(1)})
			}
		}
	}
	return filters, all
}

// keysOf returns the keys of names; ok is false if not all names are known, or can be keys.
func keysOf(names rule.Names, isWrite uint32) (keys []detectDetectName, ok bool) {
	for level, list := range [][]string{names.Files, names.Folders, names.Above} {
		for _, name := range list {
			key := detectDetectName{IsWrite: isWrite, Level: uint32(level)}
			if len(name) >= len(key.Name)-1 { // the program cuts longer names to this size
				return nil, false
			}
			for i := range len(name) {
				key.Name[i] = int8(name[i])
			}
			keys = append(keys, key)
		}
	}
	return keys, !names.Any
}
