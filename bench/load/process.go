package load

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
)

// command is the hidden first argument that makes a benchmark the load generator. That is a process of its
// own, because it has a network namespace of its own.
const command = "load-generator"

// Start makes a process of this program the load generator, and returns its result. run runs a program to its
// end in the place that the load is to come from, and returns its standard output. Main is the other side.
func Start(run func(program string, args ...string) (string, error), o Options) (*Result, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	out, err := run(self, command, string(text))
	if err != nil {
		return nil, err
	}
	var result Result
	if err := json.Unmarshal([]byte(out), &result); err != nil {
		return nil, fmt.Errorf("the load generator printed %q: %w", out, err)
	}
	return &result, nil
}

// Main is the load generator, where the arguments of the program (os.Args) come from Start. Is
// false: they are not, and nothing was done.
func Main(arguments []string, out io.Writer) (is bool, err error) {
	if len(arguments) != 3 || arguments[1] != command {
		return false, nil
	}
	var o Options
	if err := json.Unmarshal([]byte(arguments[2]), &o); err != nil {
		return true, fmt.Errorf("read the options of the load: %w", err)
	}
	result, err := Run(o)
	if err != nil {
		return true, err
	}
	return true, json.NewEncoder(out).Encode(result)
}
