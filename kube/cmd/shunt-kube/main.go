// Command shunt-kube balances the Services of a Kubernetes cluster, on one of its nodes. See
// docs/guide/kubernetes.md.
package main

import (
	"os"

	"github.com/shunt-lb/shunt/kube/command"
)

func main() {
	os.Exit(command.Main(os.Args[1:], os.Stdout, os.Stderr))
}
