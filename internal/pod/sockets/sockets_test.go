package sockets

import "testing"

func TestSelf(t *testing.T) {
	all, err := Test()
	for _, c := range all {
		t.Logf("%-12s %v %s", c.Name, c.Must, c.Broken)
	}
	if err != nil {
		t.Fatal(err)
	}
}
