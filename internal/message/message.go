// Package message translates the daemon's state into messages of the API.
package message

import (
	"strings"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/value"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Conditions are conditions as messages.
func Conditions(all []condition.Condition) []*shuntv1.Condition {
	return Each(all, func(c condition.Condition) *shuntv1.Condition {
		return &shuntv1.Condition{Code: c.Code, Severity: string(c.Severity), Subject: Text(c.Subject), Text: Text(c.Text), Remedy: Text(c.Remedy), Since: Time(c.Since)}
	})
}

// Faults are a file's faults as messages.
func Faults(all []config.Fault) []*shuntv1.Fault {
	return Each(all, func(f config.Fault) *shuntv1.Fault {
		return &shuntv1.Fault{File: Text(f.File), Line: uint32(f.Line), Column: uint32(f.Column), Severity: string(f.Severity), Path: Text(f.Path),
			Text: Text(f.Text), Message: Text(f.Message), Suggestion: Text(f.Suggestion)}
	})
}

// Settings are differences of settings as messages.
func Settings(all []value.SettingDifference) []*shuntv1.SettingDifference {
	return Each(all, func(d value.SettingDifference) *shuntv1.SettingDifference {
		return &shuntv1.SettingDifference{Key: Text(d.Key), Before: Text(d.Before), After: Text(d.After)}
	})
}

// Each translates all.
func Each[F, M any](all []F, translate func(F) M) (out []M) {
	for _, from := range all {
		out = append(out, translate(from))
	}
	return out
}

// Text is valid UTF-8, without which protobuf refuses a whole message: names of files and interfaces may be any bytes.
func Text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// Time is a moment as a message; absent for the zero time.
func Time(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
