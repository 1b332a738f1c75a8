package main

// never are the packages that always run, by folder, and why. All others may rest: of a test that starts
// a compiler or git, which read files unseen, look notices it, and does not record its package.
var never = map[string]string{
	"test/tidy": "its tests are about all files of the repository, and take seconds",
}
