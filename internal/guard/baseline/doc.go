// Package baseline compares a Linux system's files with the demands of a template, repairs the differences, and undoes
// repairs. It reads a tree (/ or a folder that holds a system), runs no program of it, and asks no kernel.
//
//	template ── examine(tree) ──► findings
//	    │
//	    └── repair(tree) ──► changes, only in memory ──► diff
//	                            │
//	                            ├─ 1. journal: each object as it was and as it will be, synced
//	                            └─ 2. the tree: one rename, or one chmod, an object
//
// Repairs are planned in memory, and the item is examined again with them: a repair that does not help is not written. A crash
// between two steps leaves a journal by which Rollback restores everything.
package baseline
