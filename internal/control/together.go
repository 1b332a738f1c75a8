package control

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
)

// Together gives interfaces of pods of one pattern and mode one attachment, which is called PATTERN (COUNT), unless all
// are to be shown. Other interfaces stay as they are. A daemon that serves pods with interfaces of their own has
// hundreds.
func Together(attached []*shuntv1.Attachment, all bool) (rows []*shuntv1.Attachment) {
	type kind struct{ pattern, mode string }
	count := map[kind]int{}
	for _, a := range attached {
		count[kind{a.Pattern, a.Mode}]++
	}
	row := map[kind]*shuntv1.Attachment{}
	for _, a := range attached {
		k := kind{a.Pattern, a.Mode}
		if all || a.Pattern == "" || count[k] == 1 {
			rows = append(rows, a)
			continue
		}
		if row[k] == nil {
			row[k] = &shuntv1.Attachment{Interface: fmt.Sprintf("%s (%d)", a.Pattern, count[k]), Mode: a.Mode}
			rows = append(rows, row[k])
		}
		if a.FramesMissed != nil {
			row[k].FramesMissed = proto.Uint64(row[k].GetFramesMissed() + *a.FramesMissed)
		}
	}
	return rows
}
