// Package vdisk follows the requests of a virtual machine's disks through qemu and the host's kernel: it records events
// into a file, and says later of each request where its bytes are, and in which layer it was for how long.
package vdisk
