// Package policy is the language of the guard's policies: the key guard of a file, its meaning, and its
// faults. It needs no root, and does not look at the machine.
package policy
