package file

import (
	"maps"
	"slices"

	"github.com/shunt-lb/shunt/internal/config"
)

// pool is one of the file's pools.
type pool struct {
	*poolEntry
	used bool // by a service
}

// readPools finds the pools by their names.
func (b *builder) readPools(doc *document) {
	b.pools = map[string]*pool{}
	for i := range doc.Pools.Items {
		entry := &doc.Pools.Items[i]
		name := entry.Name.Value
		if name == "" {
			continue
		}
		if earlier, double := b.pools[name]; double {
			b.parsed.faults.Errorf(entry.Name.Mark, "give one of them another name", "pool %q is in the list twice, first at %s", name, earlier.Name.At)
			continue
		}
		b.pools[name] = &pool{poolEntry: entry}
	}
}

// fromPool gives a service the backends and the health of its pool, as if they were written there. Services
// share them, and a fault in them is reported once.
func (b *builder) fromPool(entry *serviceEntry) {
	faults := b.parsed.faults
	if !entry.Pool.Set {
		if !entry.Backends.Set && !entry.Bad {
			faults.Errorf(entry.Mark, "write for example backends: [{address: 10.0.0.2}]", "the service has neither backends nor a pool")
		}
		return
	}
	for _, own := range []struct {
		mark *config.Mark
		name string
	}{{&entry.Backends.Mark, "backends"}, {&entry.Health.Mark, "health"}} {
		if own.mark.Set {
			faults.Errorf(*own.mark, "write it in the pool, or remove pool", "a service with a pool has no %s of its own", own.name)
		}
	}
	name := entry.Pool.Value
	of, known := b.pools[name]
	if !known {
		entry.Backends = config.List[backendEntry]{Mark: config.Mark{At: entry.Pool.At, Set: true, Bad: true}}
		if entry.Pool.Bad {
			return
		}
		suggestion := "add it under pools"
		if near := config.Nearest(name, slices.Sorted(maps.Keys(b.pools))); near != "" {
			suggestion = "did you mean \"" + near + "\"?"
		}
		faults.Errorf(entry.Pool.Mark, suggestion, "there is no pool %q", name)
		return
	}
	of.used = true
	entry.Backends, entry.Health = of.Backends, of.Health
}

// unusedPools names the pools that no service uses.
func (b *builder) unusedPools(doc *document) {
	for i := range doc.Pools.Items {
		if entry := &doc.Pools.Items[i]; b.pools[entry.Name.Value] != nil && !b.pools[entry.Name.Value].used {
			b.parsed.faults.Warnf(entry.Name.Mark, "write pool: "+entry.Name.Value+" in a service, or remove it", "no service has the pool %q", entry.Name.Value)
		}
	}
}
