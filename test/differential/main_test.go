package differential_test

import (
	"flag"
	"math/rand/v2"
	"os"
	"testing"
)

var (
	seedFlag    = flag.Uint64("differential.seed", 0, "of the first episode; each next one has one more. 0: drawn, or 1 where CI is set")
	packetsFlag = flag.Int("differential.packets", 0, "how many packets are sent. 0: ten million with SHUNT_SOAK, fewer otherwise")
)

// TestMain makes runs that judge a change send the same packets each time: a failure of new packets
// is rarely due to that change. By hand and in `make soak` the seed is drawn.
func TestMain(m *testing.M) {
	flag.Parse()
	if *seedFlag == 0 {
		*seedFlag = 1
		if os.Getenv("CI") == "" {
			*seedFlag = rand.Uint64N(1 << 50) // short enough to type
		}
	}
	if *packetsFlag == 0 {
		*packetsFlag = 100_000
		switch {
		case os.Getenv("SHUNT_SOAK") != "":
			*packetsFlag = 10_000_000
		case testing.Short():
			*packetsFlag = 10_000
		}
	}
	os.Exit(m.Run())
}
