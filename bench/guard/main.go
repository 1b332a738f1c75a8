// Guard measures the cost of the features of shunt guard for the programs of a machine: opening and changing files,
// starting programs, connecting.
//
//	go run -exec sudo ./bench/guard            writes a page to bench/results
//	go run -exec sudo ./bench/guard --quick    one short round, to standard output alone
//	go run -exec sudo ./bench/guard --opens    opens that wait without BPF LSM, to standard output alone
//
// A process does one thing again and again, without the guard and under each of its features. The time is CPU time, the
// process's own and its children's. Where the kernel lets no BPF program decide, protection is left out; a guest of
// test/kernel has it, where only the ratios mean something:
//
//	go run ./test/kernel --kernels 6.1 --packages ./bench/guard=TestUnderProtection -v
//
// Without BPF LSM, opens of protected files wait for the guard. No CPU works during this wait, so it is measured by the
// clock, in a table of its own.
//
// Detection watches, and connections are denied to, the process's cgroup alone. Protection is of the whole machine.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"

	"github.com/shunt-lb/shunt/bench/machine"
	"github.com/shunt-lb/shunt/test/deed"
)

func main() {
	deed.Work()
	quick := flag.Bool("quick", false, "one short round, printed to standard output only")
	opens := flag.Bool("opens", false, "measure only opens that wait without BPF LSM, and print to standard output only")
	dir := flag.String("results", "bench/results", "folder for the page")
	flag.Parse()
	if err := run(*quick, *opens, *dir); err != nil {
		fmt.Fprintln(os.Stderr, "guard:", err)
		os.Exit(1)
	}
}

func run(quick, onlyWaits bool, dir string) error {
	r := report{rounds: 15, share: 1, pieces: 20, onlyWaits: onlyWaits}
	if onlyWaits {
		r.pieces = 10
	}
	if quick {
		r.rounds, r.share = 1, 20
	}
	if err := r.measure(os.Stderr); err != nil {
		return err
	}
	if quick || onlyWaits {
		return r.page(os.Stdout)
	}
	m, err := machine.Describe()
	if err != nil {
		return err
	}
	page, err := os.Create(dir + "/" + m.ReportName(dir, "guard-") + ".md")
	if err != nil {
		return err
	}
	return errors.Join(r.page(page), page.Close())
}
