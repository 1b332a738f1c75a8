package main

// never has the packages that always run, by folder, with the reason. All other packages may rest.
var never = map[string]string{
	"test/tidy": "its tests are about all files of the repository",
}

// programs read the repository's files themselves, so the log of a test that starts one of them lacks the files on
// which its result depends. A package with such a test always runs, unless it is in starts.
var programs = []string{"go", "git", "make", "cc", "c++", "gcc", "g++", "musl-gcc", "clang", "clang-19", "clang++", "clang++-19"}

// starts has the packages whose tests start one of programs, by folder, with the files and folders of the
// repository that these programs read. Everything below them counts, and so does everything in the log.
var starts = map[string][]string{
	"bench/guard":            nil,                                        // git: the commit, which is shown
	"bench/machine":          nil,                                        // the same
	"bench/percall":          nil,                                        // clang: in an empty folder
	"bench/remember":         nil,                                        // the same
	"bench/udppath":          {"bench/udppath", "udp"},                   // cc: peers; git: the same
	"internal/diag/memleak":  {"internal/diag/memleak"},                  // gcc: the program that leaks
	"internal/guard/decoy":   nil,                                        // git: repositories that its tests make
	"internal/guard/protect": {"internal/guard/protect"},                 // looks for compilers
	"internal/udp/broker":    {"internal/udp", "internal/kernel", "udp"}, // compilers: programs against udp/c; go: udp/examples
	"kube/net":               {"test/kube"},                              // go: the control plane
	"test/rest":              nil,                                        // go: in repositories that its tests make
	"udp":                    {"udp"},                                    // compilers: the header and its examples
}
