package command

import (
	"errors"
	"os"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/decoy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/value"
)

// left lists the guard's traces for `shunt uninstall`.
func left() ([]cli.Trace, error) {
	all, err := leftConnections(agent.RunDirectory)
	if err == nil { // otherwise both would list the same
		var protection []cli.Trace
		protection, err = leftProtection()
		all = append(all, protection...)
	}
	decoys, errDecoys := leftDecoys(decoyFolders{decoy.Directory, agent.RunDirectory})
	return append(append(all, decoys...), leftLimits(agent.LimitName)...), errors.Join(err, errDecoys)
}

// leftProtection lists the protection that is left in the kernel.
func leftProtection() ([]cli.Trace, error) {
	status, err := protect.Look(kernel.DefaultPinRoot)
	switch {
	case err != nil || status == nil:
		return nil, err
	case status.Listening:
		return nil, errors.New("`shunt guard run` is running; end it first")
	}
	return []cli.Trace{{Kind: "guard", What: "protection of files by " + value.Counted(len(status.Rules), "rule"), Remove: func() error {
		_, err := protect.Stop(kernel.DefaultPinRoot)
		return err
	}}}, nil
}

// leftLimits lists cgroups that a killed guard has left. One that has a process cannot be removed, and the error
// says so.
func leftLimits(name string) (all []cli.Trace) {
	for _, folder := range cgroup.LeftLimits(name) {
		all = append(all, cli.Trace{Kind: "cgroup", What: folder, Remove: func() error { return os.Remove(folder) }})
	}
	return all
}
