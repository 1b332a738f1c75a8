// Package vdisk follows the requests of a virtual machine's disks through qemu and the host's kernel: it records events
// into a file, and later reports for each request the place of its bytes, and its time in each layer.
package vdisk
