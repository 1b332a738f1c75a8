// Package products lists shunt's products, as a node runs them.
package products

import (
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/node"
	pod "github.com/shunt-lb/shunt/internal/pod/daemon"
	udp "github.com/shunt-lb/shunt/internal/udp/daemon"
)

// All is every product. A file that names none configures the first.
func All() []node.Product {
	return []node.Product{daemon.Product(daemon.Options{}), udp.Product(), pod.Product()}
}
