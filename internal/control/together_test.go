package control

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
)

// TestPodsInOneRow: interfaces of pods of one pattern and mode share a row, with the sum of the frames that they
// missed; other interfaces have a row each, and so have all interfaces if all are to be shown.
func TestPodsInOneRow(t *testing.T) {
	attached := []*shuntv1.Attachment{{Interface: "cali1", Mode: "tcx", Pattern: "cali*"}, {Interface: "eth0", Mode: "native"},
		{Interface: "veth1", Mode: "tcx", Pattern: "veth*", FramesMissed: proto.Uint64(2)}, {Interface: "veth2", Pattern: "veth*"},
		{Interface: "veth3", Mode: "tcx", Pattern: "veth*"}, {Interface: "veth4", Mode: "tcx", Pattern: "veth*", FramesMissed: proto.Uint64(5)}}
	for all, want := range map[bool]string{
		false: "cali1 tcx 0, eth0 native 0, veth* (3) tcx 7, veth2  0",
		true:  "cali1 tcx 0, eth0 native 0, veth1 tcx 2, veth2  0, veth3 tcx 0, veth4 tcx 5"} {
		var rows []string
		for _, a := range Together(attached, all) {
			rows = append(rows, fmt.Sprintf("%s %s %d", a.Interface, a.Mode, a.GetFramesMissed()))
		}
		if got := strings.Join(rows, ", "); got != want {
			t.Errorf("with all %v, the rows are\n%s, want\n%s", all, got, want)
		}
	}
}
