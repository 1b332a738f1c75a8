// Package tidy holds the rules of this repository that a machine can check: how long a
// function may be, what every map and package must say about itself, which package may
// import which, and that what the documents show is true. It has tests and nothing else:
//
//	go test ./test/tidy
//
// Every rule is a function from one file to the places that break it, so that a test can
// give each rule a bad file and see that it is found.
package tidy
