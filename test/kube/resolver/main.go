// Command resolver is CoreDNS with the plugins that a test cluster's names need, and no others: all of them
// would take minutes to compile.
package main

import (
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
)

func main() {
	dnsserver.Directives = []string{"ready", "health", "errors", "kubernetes"}
	coremain.Run()
}
