// Package rule judges events of processes: the events' shape, the language of expressions, which is a part of CEL
// (https://cel.dev), the rules that shunt brings along, and MITRE ATT&CK's techniques.
package rule
