package main

import (
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/shunt-lb/shunt/internal/commands"
)

// writeManual writes a page of section 1 for each command into a folder.
func writeManual(folder, version string, at time.Time) error {
	root := commands.Command()
	root.DisableAutoGenTag = true
	return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "shunt " + version, Manual: "shunt", Date: &at}, folder)
}

// writeCompletions writes the scripts with which bash, zsh and fish complete commands and flags, under
// the names that each shell looks for.
func writeCompletions(folder string) error {
	root := commands.Command()
	for name, write := range map[string]func(*cobra.Command, io.Writer) error{
		"shunt.bash": func(c *cobra.Command, w io.Writer) error { return c.GenBashCompletionV2(w, true) },
		"_shunt":     func(c *cobra.Command, w io.Writer) error { return c.GenZshCompletion(w) },
		"shunt.fish": func(c *cobra.Command, w io.Writer) error { return c.GenFishCompletion(w, true) },
	} {
		f, err := os.Create(filepath.Join(folder, name))
		if err != nil {
			return err
		}
		if err := write(root, f); err != nil {
			_ = f.Close()
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	return nil
}
