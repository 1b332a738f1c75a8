package main

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/shunt-lb/shunt/internal/machine"
)

// withRules are packages whose tests load rules of iptables and nftables with these programs.
var withRules = []string{"bench/offered"}

// rulePrograms are the host's programs for such packages.
var rulePrograms = []program{{"iptables-restore", "iptables"}, {"nft", "nftables"}}

// ruleModules are the modules for the rules of iptables.
var ruleModules = []string{"nft_compat", "nft_reject_ipv4", "xt_addrtype", "xt_comment", "xt_conntrack", "xt_mark", "xt_MASQUERADE", "xt_nat", "xt_tcpudp"}

// needRules reports whether one of the packages loads such rules.
func needRules(tests []compiled) bool {
	return slices.ContainsFunc(tests, func(t compiled) bool { return slices.Contains(withRules, t.name) })
}

// addRules packs the programs, and the extensions of iptables under their names here.
func addRules(a *machine.Archive) error {
	for _, p := range rulePrograms {
		file, err := exec.LookPath(p.name)
		if err != nil {
			return err
		}
		if err := a.AddProgram(filepath.Join("/sbin", p.name), file); err != nil {
			return err
		}
	}
	extensions, err := filepath.Glob("/usr/lib/*/xtables/libxt_*.so")
	if err != nil || len(extensions) == 0 {
		return errors.Join(err, fmt.Errorf("no extensions of %s are in /usr/lib/*/xtables", rulePrograms[0].name))
	}
	for _, e := range extensions {
		if err := a.AddFile(e, e, 0o644); err != nil {
			return err
		}
	}
	return nil
}
