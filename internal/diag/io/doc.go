// Package io says which process and which file the IO of the disks is from.
package io
