package products

import (
	"bytes"
	"fmt"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
	"github.com/shunt-lb/shunt/internal/node"
)

// Format describes the keys that a file may hold: the keys of every product.
func Format() *config.Format { return node.Format(All()) }

// Schema is the JSON Schema of the file, for editors.
func Schema() []byte { return node.Schema(All()) }

// Guide is docs/guide/configuration.md: the reference of the format in Markdown, made
// from the products' structs, as the parser is.
func Guide() []byte {
	var b bytes.Buffer
	b.WriteString(guideIntroduction)
	fmt.Fprintf(&b, "## A whole file\n\n```yaml\n%s```\n", file.Sample)
	b.Write(Format().Reference())
	return b.Bytes()
}

const guideIntroduction = `# The configuration file

<!-- Generated from the format.go of each product: go test ./internal/products -update -->

` + "`--config`" + ` takes a YAML file or a directory. In a directory, shunt reads every ` + "`*.yaml`" + ` file whose name does not begin with
a dot, in the order of names. Lists are appended to each other. Any other value may be set in one file only.

- ` + "`shunt check --config FILE`" + ` reports every fault with its line, column and a suggestion. It needs no root and no
  daemon. ` + "`--host`" + ` turns warnings about facts that only this machine knows (interfaces, routes) into errors.
- ` + "`shunt schema`" + ` prints a JSON Schema for editors.
- Every combination of address, port and protocol of a service is a *frontend*. All frontends of a service share its
  backends and its table. An exact port takes precedence over a range, and a range over ` + "`any`" + `. Every other overlap is an
  error. A frontend without a backend of its family is also an error, unless the service uses direct return (` + "`dsr-*`" + `) and
  all its backends are of the other family.
- A file configures the products whose keys it has. The balancer's keys are ` + "`interfaces`, `services`" + ` and the keys for them,
  the UDP path's keys are ` + "`udp` and `udp_socket`" + `, and the pod shortcut's key is ` + "`accelerate`" + `. An interface, and an address with
  its port, can belong to only one of the products.
- Durations carry a unit: ` + "`ms`, `s`, `m`, `h`" + `, or several, as in ` + "`2h4m`" + `. The minimum is 10ms and the maximum is 24 days
  (` + "`576h`" + `), unless the table says otherwise.
- Keys at the top of the file that begin with ` + "`x-`" + ` are ignored. YAML anchors, aliases and merge keys work.
- Environment variables in the file are not expanded.
- A feature that shunt knows by name but does not support yet is refused, never ignored.

`
