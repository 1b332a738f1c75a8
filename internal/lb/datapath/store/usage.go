package store

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Usage counts the traffic of services and backends, and its outcomes.
type Usage struct {
	Services map[string]Traffic // over the records of both families
	Backends map[model.BackendAddress]Traffic
	Reasons  map[string]kernel.Count // without zeros
	// SourcePorts is the number of source ports of full NAT, for each source address, backend and protocol.
	SourcePorts uint16
}

// Usage reads the counters, without the rest of the Contents.
func (v *View) Usage() (Usage, error) {
	counters, err := v.Counters()
	if err != nil {
		return Usage{}, err
	}
	u := Usage{Services: make(map[string]Traffic, len(counters.Services)), Backends: make(map[model.BackendAddress]Traffic, len(counters.Backends)),
		Reasons: counters.Reasons, SourcePorts: abi.PortCount(&v.settings[0])}
	for index, name := range counters.names {
		one := u.Services[name]
		one.add(counters.Services[index])
		u.Services[name] = one
	}
	for index, traffic := range counters.Backends {
		if b := v.backendAt(index); b.Address.IsValid() { // else it went just now
			u.Backends[b] = traffic
		}
	}
	return u, nil
}

// OpenByName is the number of flows in use, as OpenFlows counts them.
type OpenByName struct {
	Services map[string]uint64
	Backends map[model.BackendAddress]uint64
}

// CountOpen counts the flows in use. It walks through the flow table, which takes 30 ms for each million flows
// that the table has room for.
func (v *View) CountOpen() (OpenByName, error) {
	o := OpenByName{map[string]uint64{}, map[model.BackendAddress]uint64{}}
	names, err := v.serviceNames()
	if err != nil {
		return o, err
	}
	counts, err := v.OpenFlows()
	if err != nil {
		return o, err
	}
	for index, name := range names {
		o.Services[name] += counts.Services[index]
	}
	for index, n := range counts.Backends {
		if b := v.backendAt(uint32(index)); n > 0 && b.Address.IsValid() {
			o.Backends[b] = n
		}
	}
	return o, nil
}

// serviceNames returns the names of the present services, by index.
func (v *View) serviceNames() (map[uint32]string, error) {
	names := map[uint32]string{}
	var key abi.NameKey
	var name abi.Name
	all := v.maps[abi.MapNames].Iterate()
	for all.Next(&key, &name) {
		if key.Kind == uint32(abi.NAME_SERVICE) && int(key.Index) < len(v.services) {
			names[key.Index] = abi.FromName(name)
		}
	}
	if err := all.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", abi.MapNames, err)
	}
	return names, nil
}

// backendAt returns the backend with an index, or none.
func (v *View) backendAt(index uint32) model.BackendAddress {
	b := &v.backends[index]
	if b.Live == 0 {
		return model.BackendAddress{}
	}
	return model.BackendAddress{Address: abi.FromAddr(b.Address), Port: kernel.FromWire(b.Port)}
}

// trafficBatch is the number of elements that are read at once.
const trafficBatch = 1024

// readTraffic reads the first elements of an array of struct traffic, summed over the CPUs.
func (v *View) readTraffic(name string, count uint32) ([]Traffic, error) {
	all := make([]Traffic, 0, count)
	cpus := ebpf.MustPossibleCPU()
	keys, values := make([]uint32, min(trafficBatch, count)), make([]abi.Traffic, int(min(trafficBatch, count))*cpus)
	var cursor ebpf.MapBatchCursor
	for uint32(len(all)) < count {
		n, err := v.maps[name].BatchLookup(&cursor, keys, values, nil)
		// The kernel reports that the key does not exist when the batch reaches the end of the map.
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) || n == 0 {
			return nil, fmt.Errorf("read %d elements of %s from %d on: %w", len(keys), name, len(all), err)
		}
		for i := range n {
			var sum Traffic
			for _, one := range values[i*cpus : (i+1)*cpus] {
				sum.add(Traffic{one.PacketsIn, one.BytesIn, one.PacketsOut, one.BytesOut, one.FlowsCreated})
			}
			all = append(all, sum)
		}
	}
	return all[:count], nil
}
