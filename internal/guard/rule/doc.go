// Package rule judges events of processes: it has the form of the events, the language of expressions, which is a part of CEL
// (https://cel.dev), shunt's own rules, and MITRE ATT&CK's techniques.
package rule
