// Package baseline compares a Linux system's files with what a template asks of them, changes what differs, and takes
// the changes back. It reads a tree (/ or a folder that holds a system), runs nothing of it, and asks no kernel.
//
//	template ── examine(tree) ──► findings
//	    │
//	    └── repair(tree) ──► changes, only in memory ──► diff
//	                            │
//	                            ├─ 1. journal: each object as it was and as it will be, synced
//	                            └─ 2. the tree: one rename, or one chmod, an object
//
// Repairs are made in memory, and the item is examined again on top of them: what does not help is not written. A crash
// between two steps leaves a journal by which Rollback brings everything back.
package baseline
