// Package top is one screen of what the other tools find out: disks, IO, waits for CPUs, stalls, and the kernel's memory
// that grows. It adds no sensors of its own.
package top
