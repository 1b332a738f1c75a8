package settings

import (
	"os/user"
	"strconv"
)

// HasGroup reports whether this machine has a group of users, by name or number.
func HasGroup(name string) bool {
	if _, err := strconv.ParseUint(name, 10, 31); err == nil {
		return true // a number needs no name
	}
	_, err := user.LookupGroup(name)
	return err == nil
}
