package load

import "testing"

func TestParseWrk(t *testing.T) {
	const clean = "Running 2s test\n  100 requests in 2.00s\nRequests/sec:  54321.50\nTransfer/sec: 1MB\n"
	const faulty = "  Socket errors: connect 1, read 2, write 3, timeout 4\n  Non-2xx or 3xx responses: 5\nRequests/sec: 10.0\n"
	for _, test := range []struct {
		name, text string
		rate       float64
		errors     int
		bad        bool
	}{
		{"clean", clean, 54321.5, 0, false},
		{"faulty", faulty, 10, 15, false},
		{"no figure", "unable to connect\n", 0, 0, true},
	} {
		rate, errors, err := ParseWrk(test.text)
		if rate != test.rate || errors != test.errors || (err != nil) != test.bad {
			t.Errorf("%s: %v, %d, %v", test.name, rate, errors, err)
		}
	}
}
