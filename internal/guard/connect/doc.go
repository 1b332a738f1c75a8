// Package connect makes the kernel deny connections to programs that a policy names. It decides at security hooks if
// BPF programs may, and otherwise at a cgroup, where fewer operations can be denied: Coverage lists them.
package connect
