// Package tidy holds the rules of this repository that a machine can check: how long a
// function may be, the comments that every map and package needs, the packages that a package
// may import, and whether the documents are true. It has only tests:
//
//	go test ./test/tidy
//
// Every rule is a function from one file to the places that break it, so that a test can give
// each rule a bad file and check that the rule finds it.
package tidy
