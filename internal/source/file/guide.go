package file

import (
	"bytes"
	_ "embed" // the sample
	"fmt"
)

// Sample is a configuration that uses most of the format. It has no faults.
//
//go:embed sample.yaml
var Sample []byte

// Guide is docs/guide/configuration.md: the reference of the format in Markdown, made
// from the structs of format.go, as the parser is.
func Guide() []byte {
	var b bytes.Buffer
	b.WriteString(guideIntroduction)
	fmt.Fprintf(&b, "## A whole file\n\n```yaml\n%s```\n", Sample)
	b.Write(format.Reference())
	return b.Bytes()
}

const guideIntroduction = `# The configuration file

<!-- Generated from internal/source/file/format.go: go test ./internal/source/file -update -->

` + "`--config`" + ` takes a YAML file, or a directory. Of a directory, every ` + "`*.yaml`" + ` that does not begin with a dot is
read, in the order of names: lists are appended to each other, and a value may be set in one file only.

- ` + "`shunt check --config FILE`" + ` reports every fault with its line, column and a suggestion. It needs no root and no
  daemon. ` + "`--host`" + ` turns what only this machine knows (interfaces, routes) from warnings into errors.
- ` + "`shunt schema`" + ` prints a JSON Schema for editors.
- Every address, port and protocol of a service together is a *frontend*. All frontends of a service share its backends
  and its table. An exact port beats a range, and a range beats ` + "`any`" + `; every other overlap is an error, and so is a
  frontend without a backend of its family, unless the service is one of direct return (` + "`dsr-*`" + `) whose backends are all
  of the other family.
- Durations carry a unit: ` + "`ms`, `s`, `m`, `h`" + `, or several, as in ` + "`2h4m`" + `. The least is 10ms, the most 24 days (` + "`576h`" + `),
  unless the table says otherwise.
- Keys at the top of the file that begin with ` + "`x-`" + ` are ignored. YAML anchors, aliases and merge keys work.
- The file expands no environment variables.
- What shunt knows by name but cannot do yet is refused, never ignored.

`
