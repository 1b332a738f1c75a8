// Package place shows that just-enough tracking (docs/design/13-just-enough-tracking.md)
// loses the flows it says it may lose, and no others. It has tests and nothing else:
//
//	go test ./test/place                                      (as root)
//	go test ./test/place -run TestRandomHistories -rapid.seed=N -v
//
// A history is a sequence of changes of the configuration, faults, restarts and time, with
// simulated clients whose packets go through the loaded program in between:
//
//	changes ─► reconcile ─► faults ─► witness ─► breakage ─► datapath ─► maps
//	                                     │                                │
//	clients ─► packets ──────────────────┼───────────────────────► loaded program
//	   │                                 ▼                                │
//	   └── who holds the connection    rules ── which backend? ◄── compare ┘
//	                   └─► losses ── was it allowed? ◄── what clients did
//
// Two judges work independently of each other, and neither looks into the code under test.
// The rules (rules_test.go) say for each packet where it must go and what must be remembered
// afterwards, by the two tables of the document and the slots that the witness has seen
// written. The losses (loss_test.go) know nothing of slots' states: a connection whose packet
// reaches another backend than the one that holds it must have a cause in the document's
// list, from what its client and the configuration did.
//
// Time is simulated: the reconciler's clock is injected, and remembered flows age by
// rewriting their time of last use while no program runs.
package place
