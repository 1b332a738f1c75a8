package message

import (
	"testing"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/value"
	"google.golang.org/protobuf/proto"
)

// Bytes that are no UTF-8 do not keep a message from being sent.
func TestAnyBytes(t *testing.T) {
	const bytes = "a\xffb"
	for _, m := range []proto.Message{
		Faults([]config.Fault{{File: bytes, Path: bytes, Text: bytes, Message: bytes, Suggestion: bytes}})[0],
		Conditions([]condition.Condition{{Subject: bytes, Text: bytes, Remedy: bytes}})[0],
		Settings([]value.SettingDifference{{Key: bytes, Before: bytes, After: bytes}})[0],
	} {
		if _, err := proto.Marshal(m); err != nil {
			t.Errorf("marshal %T: %v", m, err)
		}
	}
}
