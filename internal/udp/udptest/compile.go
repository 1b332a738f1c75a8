package udptest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Compiler is a compiler that the client in C supports.
type Compiler struct {
	Name string
	args []string
}

// compilers are gcc and clang, as C11 and as C++17.
var compilers = []Compiler{
	{"gcc", []string{"gcc", "-std=c11"}},
	{"g++", []string{"g++", "-x", "c++", "-std=c++17"}},
	{"clang", []string{"clang-19", "-std=c11"}},
	{"clang++", []string{"clang++-19", "-x", "c++", "-std=c++17"}},
}

// EachCompiler runs a subtest with each compiler. The subtests of compilers that this machine lacks skip.
func EachCompiler(t *testing.T, do func(*testing.T, Compiler)) {
	t.Helper()
	for _, c := range compilers {
		t.Run(c.Name, func(t *testing.T) {
			if _, err := exec.LookPath(c.args[0]); err != nil {
				t.Skipf("needs %s: `.ci/packages gcc g++ libc6-dev clang-19`", c.args[0])
			}
			do(t, c)
		})
	}
}

// Compile compiles, and fails the test if there is a warning.
func (c Compiler) Compile(t *testing.T, args ...string) {
	t.Helper()
	all := append([]string{"-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"}, args...)
	if out, err := exec.Command(c.args[0], append(append([]string{}, c.args[1:]...), all...)...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", c.Name, err, out)
	}
}

// compiled are the programs that Program has compiled in this process, by compiler and source.
var compiled = map[string][]byte{}

// Program compiles a source, once in a process, and puts the program into a folder.
func (c Compiler) Program(t *testing.T, folder, source string) (binary string) {
	t.Helper()
	binary = filepath.Join(folder, strings.TrimSuffix(filepath.Base(source), ".c")+c.Name)
	code, known := compiled[c.Name+" "+source]
	var err error
	if known {
		err = os.WriteFile(binary, code, 0o755)
	} else {
		c.Compile(t, "-O2", "-o", binary, source)
		code, err = os.ReadFile(binary)
		compiled[c.Name+" "+source] = code
	}
	if err != nil {
		t.Fatal(err)
	}
	return binary
}
