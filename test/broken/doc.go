// Package broken tests tests: each of its programs, made from bpf/, has one fault, and a test
// of test/packet or test/place has to notice it. Code whose faults no test notices need not be
// right.
//
//	go test ./test/broken                  (as root, with clang-19 and libbpf's headers)
package broken
