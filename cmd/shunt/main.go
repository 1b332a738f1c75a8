// Command shunt is an eBPF load balancer for Linux. See README.md.
package main

import (
	"os"

	"github.com/shunt-lb/shunt/internal/cli"
)

func main() {
	os.Exit(cli.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
