// Package memleak says which memory of the kernel becomes more and more, and who allocates it.
package memleak
