// Command shunt is an eBPF load balancer for Linux. See README.md.
package main

import (
	"os"

	"github.com/shunt-lb/shunt/internal/commands"
)

func main() {
	os.Exit(commands.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
