package load

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"time"
)

// TestStartAndMain: each side understands the other's text, without a second process.
func TestStartAndMain(t *testing.T) {
	target := serve(t, 0, 0)
	r, err := Start(func(program string, arguments ...string) (string, error) {
		var out bytes.Buffer
		is, err := Main(append([]string{program}, arguments...), &out)
		if !is {
			err = errors.New("Main does not know the arguments of Start")
		}
		return out.String(), err
	}, Options{Target: target, Rate: 100, Connections: 2, Duration: 100 * time.Millisecond})
	if err != nil || r.Answered != 10 {
		t.Errorf("%+v, %v; want 10 answers", r, err)
	}
	if _, err := Start(func(string, ...string) (string, error) { return "bad", nil }, Options{}); err == nil {
		t.Error("took an answer that is none")
	}
	if is, err := Main([]string{"bench", "--quick"}, io.Discard); is || err != nil {
		t.Errorf("took another command line: %v, %v", is, err)
	}
	if is, err := Main([]string{"bench", command, "bad"}, io.Discard); !is || err == nil {
		t.Errorf("options that are none: %v, %v", is, err)
	}
}
