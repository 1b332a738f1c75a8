package abi

// Step converts the contents of one ABI's maps into the contents of another ABI's maps: of the next ABI
// or, if going back is to work, of the previous one.
//
// Maps that it does not name keep layout and meaning: both ABIs use the same map in the kernel,
// and nothing is copied. A map that only the new ABI has begins empty.
type Step struct {
	From, To uint32
	Maps     map[string]Convert
}

// Convert converts one element of a map. It is pure: it neither keeps nor changes its arguments. Of a per-CPU
// map it gets each CPU's value separately. Elements without a returned key are left out: elements that were
// changed while they were read (a seal that does not fit) come again.
type Convert func(key, value []byte) (newKey, newValue []byte, err error)

// steps are the steps of this version. A change of SHUNT_ABI adds one; CONTRIBUTING.md says how.
var steps []Step
