// Package top shows the findings of the other tools on one screen: disks, IO, waits for CPUs, stalls, and growing memory of the
// kernel. It adds no sensors of its own.
package top
