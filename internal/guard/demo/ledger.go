package demo

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// ledger returns the arguments of the business program that add a line to a file.
func ledger(line, file string) []string { return []string{"demo", "guard-ledger", "--add", line, file} }

// starts returns the arguments of the business program that start a script for a file.
func starts(script, file string) []string {
	return []string{"demo", "guard-ledger", "--start", script, file}
}

// Ledger is the demo's business program: it adds a line to a file, or starts a script that does.
func Ledger(line, script, file string) error {
	if script != "" {
		cmd := exec.Command(script, file)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		return cmd.Run()
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, line)
	return errors.Join(err, f.Close())
}
