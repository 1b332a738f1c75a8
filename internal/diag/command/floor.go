package command

import (
	"io"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/cli/tool"
)

// streams are cli.Streams, by the names that these commands use.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

func streamsOf(s cli.Streams) streams { return streams{s.In, s.Out, s.Err} }

// The floor's parts, by the names that these commands use.
type (
	usageError = cli.UsageError
)

const (
	percentMax = tool.PercentMax
)

var (
	errSilent     = cli.ErrSilent
	noArguments   = cli.NoArguments
	requireOutput = cli.RequireOutput
	outputFlag    = cli.OutputFlag
	version       = cli.Version
	btfFlag       = tool.BTFFlag
	findTypes     = tool.FindTypes
	toolContext   = tool.Context
	privileges    = tool.Privileges
	openRotated   = tool.OpenRotated
)
