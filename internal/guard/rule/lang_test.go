package rule

import (
	"errors"
	"strings"
	"testing"
)

func sample() *Event {
	return &Event{Type: Exec, Path: "/tmp/x.sh", Process: Process{PID: 7, Program: "/usr/bin/bash", Comm: "bash", Args: []string{"bash", "-i"}},
		User: User{1000, 0}, Ancestors: []Process{{PID: 6, Program: "/usr/sbin/nginx", Comm: "nginx"}, {PID: 1, Comm: "init"}},
		FDs: [4]Descriptor{{Kind: Inet, Direction: Out, Remote: "192.0.2.1", RemotePort: 4444, Inode: 9}, {Kind: Inet, Inode: 9}, {Kind: Closed}, {Kind: Closed}}}
}

func TestExpressions(t *testing.T) {
	for source, want := range map[string]bool{
		`process.name == "bash"`:                                               true,
		`process.name in ["sh", 'bash']`:                                       true,
		`!(process.name in ["sh"])`:                                            true,
		`process.uid != 0 && process.euid == 0`:                                true,
		`process.uid < 1000 || stdin.remote_port >= 4444`:                      true,
		`false || true && false`:                                               false,
		`(true || false) && false`:                                             false,
		`ancestors.exists(a, a.name == "nginx")`:                               true,
		`ancestors.all(a, a.name == "nginx")`:                                  false,
		`ancestors.exists(a, process.args.exists(x, x == "-i" && a.pid == 1))`: true,
		`process.args.all(x, x.startsWith("b"))`:                               false,
		`parent.program.endsWith("/nginx") && exec.path.contains("tmp")`:       true,
		`exec.path.matches("^/(tmp|dev/shm)/")`:                                true,
		`process.args.size() == 2 && process.name.size() == 4`:                 true,
		`stdin.inode == stdout.inode && stdin.kind == stdout.kind`:             true,
		`stdin.loopback`:                                                       false,
		`stdin.remote_port in [1, 4444] && !(process.pid in [])` + ` || false`: true,
		`-1 < 0x10 && process.pid > -5`:                                        true,
		`"a\"b\\" == 'a"b\\'`:                                                  true,
		`process.name > "aaa" && process.name <= "bash"`:                       true,
		`process.deleted == false`:                                             true,
	} {
		if strings.Contains(source, "in []") {
			if _, err := Compile(source, []string{Exec}); err == nil {
				t.Errorf("%s: an int in a list of strings is accepted", source)
			}
			continue
		}
		x, err := Compile(source, []string{Exec})
		if err != nil {
			t.Errorf("%s: %v", source, err)
			continue
		}
		if got := x.Holds(sample()); got != want {
			t.Errorf("%s is %v", source, got)
		}
	}
}

func TestBadExpressions(t *testing.T) {
	for source, want := range map[string]string{
		``:                              "column 1: a value was expected, and there is the end",
		`process.nane == "x"`:           `column 1: there is no field "process.nane"; did you mean process.name?`,
		`true && proc.exe == "x"`:       `column 9: there is no field "proc.exe"; ` + "`shunt guard fields` lists them",
		`process.pid == "x"`:            "column 16: int was expected, and this is string",
		`process.pid`:                   "column 1: bool was expected, and this is int",
		`file.path == "x"`:              "column 1: file.path belongs to events of type open and memfd, and the rule is on exec; add open or memfd to on, or use another field",
		`true ? true : false`:           "column 6: the operator ? of CEL is not supported",
		`process.pid + 1 == 2`:          "column 13: the operator + of CEL is not supported",
		`process.name.lower() == "x"`:   "column 14: lower is not supported; there is startsWith, endsWith, contains, matches, size, exists and all",
		`process.name.matches("(")`:     "column 22: error parsing regexp: missing closing ): `(`; the syntax is RE2's",
		`process.name == "x`:            `column 17: the text has no end; close it with "`,
		`ancestors.exists(a, a.exe)`:    "column 23: a process of the list has no exe; it has pid, program, name and comm",
		`ancestors == ancestors`:        "column 11: lists are not compared; use in, or exists",
		`true true`:                     "column 6: the end was expected, and there is true",
		`process.name == "ü" && ü`:      `column 24: 'ü' has no meaning here`,
		`process.pid == 010`:            "column 16: 010 is no int; write it as 10 or 0xa",
		strings.Repeat("(", 70) + "1":   "column 65: more than 64 brackets are nested; split the rule",
		strings.Repeat("!", 70) + "1":   "column 64: more than 64 operators are nested",
		`process.name == "\d"`:          `column 18: the escape \d is not supported; write \\ for one backslash`,
		strings.Repeat("true && ", 600): "column 1: the expression is longer than 4096 bytes; split the rule",
	} {
		_, err := Compile(source, []string{Exec})
		var p *Problem
		if !errors.As(err, &p) || p.Error() != want {
			t.Errorf("%.40s\n got %v\nwant %s", source, err, want)
		}
	}
}

func TestText(t *testing.T) {
	r := Rule{On: []string{Exec}, If: "true", Tell: "{process.args} of {parent.name} to {stdin.remote}:{stdin.remote_port}!"}
	if _, err := r.Prepare(); err != nil {
		t.Fatal(err)
	}
	if got := r.Text(sample()); got != "bash -i of nginx to 192.0.2.1:4444!" {
		t.Error(got)
	}
	for source, want := range map[string]string{"ab {x": "column 4: the brace has no end", "{process.nam}": "did you mean process.name?", "{ancestors}": "is a list", "{file.path}": "to other events"} {
		r.Tell = source
		if inText, err := r.Prepare(); err == nil || !inText || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", source, err)
		}
	}
}

func FuzzCompile(f *testing.F) {
	for _, r := range Builtin() {
		f.Add(r.If)
	}
	f.Add(`ancestors.exists(a, a.pid in [1, -2]) || "\"" == 'x'`)
	f.Fuzz(func(t *testing.T, source string) {
		x, err := Compile(source, Types)
		var p *Problem
		if err != nil && (!errors.As(err, &p) || p.Column < 1 || p.Column > len(source)+2) {
			t.Fatalf("%q: %v", source, err)
		}
		if err == nil {
			x.Holds(sample())
			x.Holds(&Event{})
		}
	})
}
