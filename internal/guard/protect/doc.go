// Package protect has files protected by BPF programs at the kernel's security hooks (LSM).
//
//	policy ─► labels of inodes, for the next generation ─► masks of rules ─► the generation is switched
//	            programs are attached before, and keep labels of new files
//
// What protects is pinned: links, labels, masks. It goes on without this process, and Start takes it over.
// The reasons are in docs/design/35-guard-identity.md.
package protect
