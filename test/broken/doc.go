// Package broken tests tests: programs of bpf/ that are wrong in one way each, and the test of
// test/packet or test/place that has to notice it. What no test notices need not be right.
//
//	go test ./test/broken                  (as root, with clang-19 and libbpf's headers)
package broken
