// Package judge reads a policy on this machine, and judges by it which operations on a file a process may do.
//
//	policy ─► Read ─► Reading: the files, programs and processes of the rules ─┐
//	                   Book: which rule forbids which operation ───────────────┴─► Answer, Explain
//
// It reads files and /proc, and asks no BPF program and no map: package protect brings a Reading into the kernel, and package gate answers opens by it.
// Masks are of rules: a rule's bit has the number of the rule among policy.Policy.Enforced.
package judge
