// Package protect protects files by BPF programs at the kernel's security hooks (LSM).
//
//	policy ─► judge.Reading ─► labels of inodes, for the next generation ─► masks of rules ─► the generation is switched
//	                             programs are attached before, and keep labels of new files
//
// Links, labels and masks are pinned, so protection goes on without this process, and Start takes it over.
// docs/design/35-guard-identity.md has the reasons.
package protect
