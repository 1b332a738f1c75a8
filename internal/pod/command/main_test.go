package command

import "github.com/shunt-lb/shunt/internal/cli/clitest"

// Main is shunt with these commands alone.
var Main = clitest.Main(Product)
