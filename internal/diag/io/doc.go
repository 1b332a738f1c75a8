// Package io finds the processes and files that the IO of the disks belongs to.
//
// IO is counted where it enters the block layer, so reads that the page cache answers are not counted, and the rows of all
// processes add up to the work of the disks. A write to the page cache is charged when it is flushed, to the
// process that wrote, whichever task flushes it. IO of unknown origin is shown as unattributed.
package io
