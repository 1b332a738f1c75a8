// Package trial is the common ground of the tests of protection: a disk, programs that are copies of the test's binary, and the operations that they try
// on its files and on each other. Whether an operation is denied is for the tests to say. Only tests import it.
package trial
