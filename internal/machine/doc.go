// Package machine makes virtual machines that boot from memory: the archive that is their
// whole file system, and how the emulator is called. The tests under other kernels and the guard's demo share it.
package machine
