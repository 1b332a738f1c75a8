package place_test

import (
	"flag"
	"os"
	"testing"
)

// TestMain has a run that judges a change play the same histories each time: what a new one
// would find is rarely about that change. By hand and in `make soak` they are drawn.
func TestMain(m *testing.M) {
	flag.Parse()
	if seed := flag.Lookup("rapid.seed"); os.Getenv("CI") != "" && seed.Value.String() == "0" {
		if err := flag.Set("rapid.seed", "1"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}
