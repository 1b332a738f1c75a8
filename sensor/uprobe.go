package sensor

// Process is the process that sensors of the kind Uprobe observe, and nothing of others.
type Process struct {
	PID int
	// Executable is the file with the symbols, for example /proc/PID/exe.
	Executable string
}
