package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
)

// TestConfiguration reads the smallest and the largest file that the flags allow; one other weight is
// all that a round changes.
func TestConfiguration(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shunt.yaml")
	for _, arguments := range [][]string{
		{"--services", "1", "--backends", "1"}, {"--services", "1000", "--backends", "3", "--table-size", "0"}, {"--services", "300", "--backends", "20"},
	} {
		o, err := parseOptions(arguments)
		if err != nil {
			t.Fatal(err)
		}
		weights := map[uint16]int{}
		if err := os.WriteFile(path, []byte(configuration(o, o.services/2, 77)), 0o600); err != nil {
			t.Fatal(err)
		}
		loaded, faults, err := file.Load(path)
		if err != nil || config.HasErrors(faults) {
			t.Fatalf("%q: %v, %v", arguments, err, faults)
		}
		seen := map[string]bool{}
		for _, s := range loaded.Services {
			for _, b := range s.Backends {
				weights[b.Weight]++
				seen[b.BackendAddress.String()] = true
			}
		}
		if all := o.services * o.backends; len(seen) != all || weights[77] != 1 || weights[10] != all-1 {
			t.Errorf("%q: %d backends, by weight %v", arguments, len(seen), weights)
		}
	}
}

func TestOptions(t *testing.T) {
	for _, arguments := range [][]string{{"x"}, {"--services", "0"}, {"--services", "65001"}, {"--backends", "0"}, {"--services", "1001", "--backends", "1000"}, {"--rounds", "0"}} {
		if _, err := parseOptions(arguments); err == nil {
			t.Errorf("%q was accepted, want an error", arguments)
		}
	}
}
