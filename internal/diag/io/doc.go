// Package io says which process and which file the IO of the disks is from.
//
// IO is counted where it enters the block layer, so what the page cache answers is not in it, and the rows of all
// processes add up to what the disks have to do. A write to the page cache is charged when it is flushed, to the
// process that wrote, whichever task flushes. IO whose origin is not known is said to be unattributed.
package io
