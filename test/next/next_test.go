package next

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// sealed is an entry of the version before, with a different word in each field.
func sealed() (key, flow []byte) {
	key, flow = make([]byte, keySize), make([]byte, oldSize)
	for i := range key[:keyProtocol+1] {
		key[i] = byte(i + 1)
	}
	for i := range flow {
		flow[i] = byte(100 + i)
	}
	names := uint64(u32(flow[backend:]))<<32 | uint64(u16(flow[service:]))<<16 | uint64(flow[oldGeneration])<<8 | uint64(flow[oldDirection])
	binary.NativeEndian.PutUint64(flow, common(key, flow)+names*mix[10])
	return key, flow
}

// TestConvertFlow: every field keeps its value. The programs check the seal, in test/packet.
func TestConvertFlow(t *testing.T) {
	key, flow := sealed()
	keyBefore, flowBefore := bytes.Clone(key), bytes.Clone(flow)
	newKey, value, err := ConvertFlow(key, flow)
	if err != nil || !bytes.Equal(newKey, key) || len(value) != newSize {
		t.Fatalf("converted to %v: %v, %v", newKey, value, err)
	}
	if !bytes.Equal(key, keyBefore) || !bytes.Equal(flow, flowBefore) {
		t.Error("it changed what it was given")
	}
	if !bytes.Equal(value[8:service], flow[8:service]) || u32(value[service:]) != uint32(u16(flow[service:])) ||
		value[newGeneration] != flow[oldGeneration] || value[newDirection] != flow[oldDirection] || !bytes.Equal(value[newDirection+1:], make([]byte, 6)) {
		t.Errorf("a field has changed:\n%v\n%v", flow, value)
	}
	for i := range flow {
		if i >= 8 && i < source {
			continue // life and hop: the seal does not cover them
		}
		torn := bytes.Clone(flow)
		torn[i] ^= 0x10
		if k, _, err := ConvertFlow(key, torn); k != nil || err != nil {
			t.Errorf("octet %d is another's, and the entry was carried: %v", i, err)
		}
	}
	if _, _, err := ConvertFlow(key, flow[1:]); err == nil {
		t.Error("an entry of another size was carried")
	}
}
