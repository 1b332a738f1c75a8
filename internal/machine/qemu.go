package machine

import (
	"bufio"
	"fmt"
	"io"
	"regexp"
	"strings"
)

// Emulator is the program that runs guests.
const Emulator = "qemu-system-x86_64"

// Accelerator is qemu's -accel. Before version 8.1 it translates a page of code without a lock, so a virtual CPU
// may run code that another one has patched away meanwhile: a guest of 6.12 died of such an int3 in the middle
// of test/net. With one thread for both CPUs it cannot.
func Accelerator(version string) string {
	var major, minor int
	_, line, _ := strings.Cut(version, "version ")
	if _, err := fmt.Sscanf(line, "%d.%d", &major, &minor); err != nil || major < 8 || major == 8 && minor < 1 {
		return "tcg,thread=single"
	}
	return "tcg,thread=multi"
}

// consoleNoise are the sequences that firmware sends to clear the screen.
var consoleNoise = regexp.MustCompile("\x1b(\\[[0-9;?=]*[a-zA-Z]|c)|\r")

// CopyConsole passes the guest's lines on, without the firmware's drawings.
func CopyConsole(to io.Writer, from io.Reader) {
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadString('\n')
		if text := consoleNoise.ReplaceAllString(strings.TrimRight(line, "\r\n"), ""); text != "" {
			fmt.Fprintln(to, text)
		}
		if err != nil {
			return
		}
	}
}
