package load

import (
	"fmt"
	"regexp"
	"strconv"
)

var (
	wrkRate     = regexp.MustCompile(`(?m)^Requests/sec:\s+([0-9.]+)`)
	wrkSocket   = regexp.MustCompile(`Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)`)
	wrkStatuses = regexp.MustCompile(`Non-2xx or 3xx responses: (\d+)`)
)

// ParseWrk reads the report of wrk (https://github.com/wg/wrk): requests per second, and the number that
// failed.
func ParseWrk(out string) (rate float64, errors int, err error) {
	m := wrkRate.FindStringSubmatch(out)
	if m == nil {
		return 0, 0, fmt.Errorf("wrk's report has no Requests/sec:\n%s", out)
	}
	if rate, err = strconv.ParseFloat(m[1], 64); err != nil {
		return 0, 0, err
	}
	for _, expression := range []*regexp.Regexp{wrkSocket, wrkStatuses} {
		if m := expression.FindStringSubmatch(out); m != nil {
			for _, digits := range m[1:] {
				n, err := strconv.Atoi(digits)
				if err != nil {
					return 0, 0, err
				}
				errors += n
			}
		}
	}
	return rate, errors, nil
}
