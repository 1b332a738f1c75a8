// Package connect has the kernel deny connections to programs that a policy names. It decides at security hooks where BPF programs
// may, and else at a cgroup, where fewer operations can be denied: Coverage says which.
package connect
