package value

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Setting is a value of the configuration in words. The key is as the file writes it, as in
// "timeouts.udp"; an entry of a list has one of its own, as in "interface eth0".
type Setting struct{ Key, Value string }

// SettingDifference is another value of a setting.
type SettingDifference struct {
	Key    string `json:"key"`
	Before string `json:"before,omitempty"` // empty: there was none
	After  string `json:"after,omitempty"`  // empty: there is none
}

// String is "~ timeouts.udp: 5m -> 1m", "+ interface eth1: attach auto" or the same with a minus.
func (d SettingDifference) String() string {
	switch {
	case d.Before == "":
		return fmt.Sprintf("+ %s: %s", d.Key, d.After)
	case d.After == "":
		return fmt.Sprintf("- %s: %s", d.Key, d.Before)
	}
	return fmt.Sprintf("~ %s: %s -> %s", d.Key, d.Before, d.After)
}

// DifferentSettings are the settings that differ, sorted by key.
func DifferentSettings(before, after []Setting) (differences []SettingDifference) {
	was := map[string]string{}
	for _, s := range before {
		was[s.Key] = s.Value
	}
	for _, s := range after {
		if was[s.Key] != s.Value {
			differences = append(differences, SettingDifference{s.Key, was[s.Key], s.Value})
		}
		delete(was, s.Key)
	}
	for key, value := range was {
		differences = append(differences, SettingDifference{Key: key, Before: value})
	}
	slices.SortFunc(differences, func(a, b SettingDifference) int { return cmp.Compare(a.Key, b.Key) })
	return differences
}

// Fixed refuses changes of settings that cannot change while they are in use: those whose keys begin with
// under. why has the remedy.
func Fixed(changes []SettingDifference, under, why string) error {
	var which []string
	for _, c := range changes {
		if strings.HasPrefix(c.Key, under) {
			which = append(which, fmt.Sprintf("%s from %s to %s", c.Key, c.Before, c.After))
		}
	}
	if len(which) == 0 {
		return nil
	}
	return fmt.Errorf("%s needs restart: %s. Nothing was changed", strings.Join(which, ", "), why)
}
