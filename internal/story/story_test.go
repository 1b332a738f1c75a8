package story

import (
	"strings"
	"testing"
)

// The end of a story repeats the claims that were not true, and not the others.
func TestVerdict(t *testing.T) {
	teller := NewTeller(&strings.Builder{})
	teller.Begin("A server dies")
	teller.Claim(true, "none of 40 requests failed")
	if got, want := teller.Claims.Verdict(1.25), "All 1 claims were true, in 1.2 s."; got != want {
		t.Errorf("said %q; want %q", got, want)
	}
	teller.Claim(false, "3 of 40 connections were opened anew")
	got := teller.Claims.Verdict(1.25)
	want := "1 of 2 claims were NOT TRUE, in 1.2 s:\n  ✘ A server dies: 3 of 40 connections were opened anew"
	if got != want {
		t.Errorf("said %q; want %q", got, want)
	}
}

func TestBlocksAndLists(t *testing.T) {
	if got := Indent("a\n  b\n\n"); got != "  a\n    b" {
		t.Errorf("got %q", got)
	}
	if none, some := Found(nil), Found([]string{"a map", "a pin"}); none != "" || some != ": found a map, a pin" {
		t.Errorf("got %q and %q", none, some)
	}
}
