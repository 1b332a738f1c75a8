// Package vdisk follows the requests of a virtual machine's disks through qemu and the host's kernel: it records events
// into a file, and later reports for each request where its bytes are, and how long it was in each layer.
package vdisk
