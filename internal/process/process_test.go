package process

import (
	"errors"
	"os"
	"slices"
	"testing"
)

// This process is its parent's child, and runs. A process that does not exist is an error.
func TestReadStat(t *testing.T) {
	s, err := ReadStat(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if parent, err := s.Number(Parent); err != nil || parent != uint64(os.Getppid()) {
		t.Errorf("the parent is %d, %v, want %d", parent, err, os.Getppid())
	}
	if flags, err := s.Number(Flags); err != nil || flags&Exiting != 0 {
		t.Errorf("the flags are %#x, %v", flags, err)
	}
	if start, err := s.Number(StartTicks); err != nil || start == 0 {
		t.Errorf("it began at %d, %v", start, err)
	}
	if _, err := ReadStat(-1); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("process -1: %v", err)
	}
}

// This process and its parent are among all.
func TestAll(t *testing.T) {
	all, err := All()
	if err != nil || !slices.Contains(all, os.Getpid()) || !slices.Contains(all, os.Getppid()) {
		t.Errorf("%v, %v: process %d and its parent %d are not among them", all, err, os.Getpid(), os.Getppid())
	}
}

// A name may look like the fields after it, and a line may be cut.
func TestParseStat(t *testing.T) {
	s := parseStat([]byte("7 (a) Z 1 2 (b)) S 42 7 7 0 -1 4194308 1\n"))
	if s.State() != "S" {
		t.Errorf("the state is %q", s.State())
	}
	if parent, err := s.Number(Parent); err != nil || parent != 42 {
		t.Errorf("the parent is %d, %v", parent, err)
	}
	if flags, err := s.Number(Flags); err != nil || flags&Exiting == 0 {
		t.Errorf("the flags are %#x, %v", flags, err)
	}
	if _, err := s.Number(StartTicks); err == nil {
		t.Error("a field that is not there has a number")
	}
	for _, text := range []string{"", "7", "7 (a", "7 (a)"} {
		s := parseStat([]byte(text))
		if _, err := s.Number(Parent); err == nil {
			t.Errorf("%q has a parent", text)
		}
	}
}
