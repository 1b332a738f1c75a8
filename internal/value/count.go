package value

import (
	"fmt"
	"strings"
)

// Counted is a number of things in words, as in "1 service" and "3 services".
func Counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// Few is the first of several names, and the number of others.
func Few(names []string) string {
	const shown = 3
	if len(names) <= shown {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %s", strings.Join(names[:shown], ", "), Counted(len(names)-shown, "other"))
}
