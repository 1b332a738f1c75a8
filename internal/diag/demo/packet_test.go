package demo

import (
	"encoding/json"
	"testing"
)

// TestShare: a probe without the server's report, and one whose longest stage is another, do not count.
func TestShare(t *testing.T) {
	var all []probe
	for _, text := range []string{
		`{"round_trip_ns": 100, "stages": [{"stage": "client.send", "ns": 5}, {"stage": "server.queue", "ns": 95}]}`,
		`{"round_trip_ns": 200, "stages": [{"stage": "server.queue", "ns": 182}, {"stage": "wire.back", "ns": 18}]}`,
		`{"round_trip_ns": 400, "stages": [{"stage": "server.queue", "ns": 396}, {"stage": "wire.back", "ns": 4}]}`,
		`{"round_trip_ns": 900, "stages": [{"stage": "wire.out+server.queue+wire.back", "ns": 899}]}`,
		`{"round_trip_ns": 10, "stages": [{"stage": "server.queue", "ns": 4}, {"stage": "client.receive", "ns": 6}]}`,
		`{"lost": true}`,
	} {
		var one probe
		if err := json.Unmarshal([]byte(text), &one); err != nil {
			t.Fatal(err)
		}
		all = append(all, one)
	}
	for stage, want := range map[string]float64{"server.queue": 0.95, "client.receive": 0.6, "wire.out": 0} {
		if got := share(all, stage); got != want {
			t.Errorf("%s has %v of a round trip, want %v", stage, got, want)
		}
	}
}
