package tidy

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/commands"
)

// TestCommandsThatAreToldExist reads each command line of ours in a message, a comment or a document, and
// expects its commands and flags to exist.
func TestCommandsThatAreToldExist(t *testing.T) {
	check(t, func(s source) bool {
		return (s.isGo() || s.isC() || strings.HasSuffix(s.path, ".md")) && s.path != "CHANGELOG.md" && !strings.HasPrefix(s.path, "test/tidy/")
	}, unknownCommands)
}

var (
	// Between backticks, as far as a string goes, or a line of a shell's example.
	told    = regexp.MustCompile("`(?:sudo |\\./)*shunt ([^`\"]*)[`\"]")
	example = regexp.MustCompile(`^\s*(?:[$#] )?(?:sudo |\./)*shunt (.*)$`)
	// A word of a command that is neither a placeholder nor left open.
	commandWord = regexp.MustCompile(`^[a-z]+$`)
	flagWord    = regexp.MustCompile(`^(--[a-z-]+|-[a-z])(?:=.*)?$`)
	comments    = regexp.MustCompile(`\s{2,}.*$`)
)

func unknownCommands(s source) (found []violation) {
	isMarkdown, fenced := strings.HasSuffix(s.path, ".md"), false
	for i, line := range s.lines() {
		var texts []string
		if strings.HasPrefix(line, "```") {
			fenced = !fenced
		}
		if m := example.FindStringSubmatch(line); m != nil && isMarkdown && fenced {
			texts = append(texts, comments.ReplaceAllString(m[1], ""))
		}
		for _, m := range told.FindAllStringSubmatch(line, -1) {
			texts = append(texts, m[1])
		}
		for _, text := range texts {
			if fault := commandFault(text); fault != "" {
				found = append(found, s.at(i+1, "`shunt %s`: %s", text, fault))
			}
		}
	}
	return found
}

// TestHelpTellsCommandsThatExist does the same with the output of --help.
func TestHelpTellsCommandsThatExist(t *testing.T) {
	seen := 0
	var ask func(*cobra.Command)
	ask = func(c *cobra.Command) {
		for _, line := range strings.Split(c.Long+"\n"+c.Example, "\n") {
			if _, rest, ok := strings.Cut(line, ":  "); ok {
				line = " " + rest
			}
			m := example.FindStringSubmatch(line)
			if m == nil || !strings.HasPrefix(line, " ") {
				continue // prose
			}
			seen++
			if fault := commandFault(comments.ReplaceAllString(m[1], "")); fault != "" {
				t.Errorf("the help of %q shows %q: %s", c.CommandPath(), strings.TrimSpace(line), fault)
			}
		}
		for _, below := range c.Commands() {
			ask(below)
		}
	}
	ask(commands.Command())
	if seen < 5 {
		t.Errorf("only %d examples were found", seen)
	}
}

// commandFault is the part of a command line, without the program's name, that the program does not have.
func commandFault(text string) string {
	command := commands.Command()
	command.InitDefaultHelpFlag()
	command.InitDefaultVersionFlag()
	descending := true
	for _, word := range strings.Fields(text) {
		word = strings.Trim(word, `[]();,.'\`)
		if strings.ContainsAny(word, "|&>") && !strings.HasPrefix(word, "-") {
			break // a shell's word
		}
		if m := flagWord.FindStringSubmatch(word); m != nil {
			if !hasFlag(command, m[1]) {
				return fmt.Sprintf("%q has no flag %s", command.CommandPath(), m[1])
			}
			descending = false
			continue
		}
		if !descending || !command.HasSubCommands() || !commandWord.MatchString(word) {
			descending = false
			continue
		}
		commands := command.Commands()
		at := slices.IndexFunc(commands, func(c *cobra.Command) bool { return c.Name() == word || c.HasAlias(word) })
		if at < 0 {
			return fmt.Sprintf("%q has no command %s", command.CommandPath(), word)
		}
		command = commands[at]
		command.InitDefaultHelpFlag()
	}
	return ""
}

func hasFlag(command *cobra.Command, flag string) bool {
	if name, long := strings.CutPrefix(flag, "--"); long {
		return command.Flag(name) != nil
	}
	short := flag[1:]
	return command.LocalFlags().ShorthandLookup(short) != nil || command.InheritedFlags().ShorthandLookup(short) != nil
}

func TestCommandRulesFindWhatTheyLookFor(t *testing.T) {
	finds(t, unknownCommands, source{"a.go", "x := \"run `shunt conf`\"\n// `shunt status -o json`, `shunt backend list --nosuch`\n"}, 1, 2)
	finds(t, unknownCommands, source{"a.md", "shunt is\n```sh\nsudo shunt nosuch\n./shunt backend drain 10.0.0.2   # gently\n```\n`shunt status --clean`\n"}, 3, 6)
	finds(t, unknownCommands, source{"a.go", "\"run `shunt check --config \" + path\n\"`shunt %s`\" \"`shunt run | tee log`\" `shunt backend …` `shunt chain --help`\n"})
	finds(t, unknownCommands, source{"a.go", "`shunt backend up 10.0.0.2`\n"}, 1)
}
