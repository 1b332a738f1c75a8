package symbol

import "testing"

func TestNames(t *testing.T) {
	s := &Table{addresses: []uint64{0x100, 0x200}, names: []string{"first", "second"}}
	for address, want := range map[uint64]string{0xff: "0xff", 0x100: "first+0x0", 0x1ff: "first+0xff", 0x234: "second+0x34"} {
		if got := s.Name(address); got != want {
			t.Errorf("%#x: %s, want %s", address, got, want)
		}
	}
}
