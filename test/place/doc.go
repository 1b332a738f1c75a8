// Package place shows that just-enough tracking (docs/design/13-just-enough-tracking.md) loses
// only flows that the document allows to be lost. It has only tests:
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
//	                   └─► losses ── was it allowed? ◄── the clients' actions
//
// Two judges work independently of each other, and neither reads the code under test. The
// rules (rules_test.go) give the destination of each packet and the entries afterwards, from
// the two tables of the document and the slots that the witness has seen written. The losses
// (loss_test.go) do not use slots' states: if a packet of a connection reaches another backend
// than the one that holds it, the loss must have a cause in the document's list, from the
// actions of its client and of the configuration.
//
// Time is simulated: the reconciler's clock is injected, and remembered flows age by rewriting
// their time of last use while no program runs.
package place
