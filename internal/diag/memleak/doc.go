// Package memleak finds kernel memory that grows steadily, and the code that allocates it.
package memleak
