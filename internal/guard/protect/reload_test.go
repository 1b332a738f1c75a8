package protect

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// hammers try an operation again and again until a line comes, and then print how often it worked and was refused.
var hammers = map[string]func(in *bufio.Reader, path string){
	"hammer-write": func(in *bufio.Reader, path string) {
		hammer(in, func() error { return openWrite(path, unix.O_WRONLY) })
	},
	"hammer-script": func(in *bufio.Reader, path string) {
		hammer(in, func() error { return startRun("script", path) })
	},
}

// hammerPause leaves the CPUs to the loads: in an emulated machine three hammers without it leave next to nothing.
const hammerPause = 5 * time.Millisecond

func hammer(in *bufio.Reader, attempt func() error) {
	fmt.Println("ready")
	end := make(chan error, 1)
	go func() {
		_, err := in.ReadString('\n')
		end <- err
	}()
	done, refused := 0, 0
	for {
		switch err := attempt(); {
		case err == nil:
			done++
		case errors.Is(err, unix.EPERM):
			refused++
		default:
			fmt.Println(err)
			return
		}
		select {
		case <-end:
			fmt.Printf("%d done, %d refused\n", done, refused)
			return
		case <-time.After(hammerPause):
		}
	}
}

// reload switches between two policies that number the same rules in another order, while an untrusted program, a
// trusted one and a program that a trusted one starts write all the time.
func (f *family) reload(t *testing.T, g *Guard, times int) {
	t.Helper()
	forth := f.rules()
	back := slices.Clone(forth)
	slices.Reverse(back)
	for _, rules := range [][]policy.Rule{forth, back} { // from here on the rules are the same
		if err := g.Apply(policy.Policy{Rules: rules}); err != nil {
			t.Fatal(err)
		}
	}
	var all []*helper
	for _, one := range [][2]string{{"test/bin/copy", "hammer-write"}, {"test/bin/app", "hammer-write"}, {"test/bin/app", "hammer-script"}} {
		h, err := begin(f.path(one[0]), one[1], f.path("test/data"))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, h)
	}
	began := time.Now()
	for i := range times {
		if err := g.Apply(policy.Policy{Rules: [][]policy.Rule{forth, back}[i%2]}); err != nil {
			t.Fatalf("reload %d: %v", i, err)
		}
		if step := max(times/10, 10); i%step == step-1 {
			t.Logf("%d of %d reloads, after %v", i+1, times, time.Since(began).Round(time.Second))
		}
	}
	for i, h := range all {
		var done, refused int
		said, err := h.attempt()
		if _, scanErr := fmt.Sscanf(said, "%d done, %d refused", &done, &refused); err != nil || scanErr != nil {
			t.Errorf("%q: %v", said, err)
		}
		t.Logf("%s, in %d reloads: %s", []string{"an untrusted program", "a trusted program", "a script that a trusted program starts"}[i], times, said)
		if isUntrusted := i == 0; isUntrusted && (done > 0 || refused == 0) || !isUntrusted && (done == 0 || refused > 0) {
			t.Errorf("that is not as it should be")
		}
	}
}

// reloadsFlag is for `make soak`: an emulated machine takes seconds for each.
var reloadsFlag = flag.Int("reloads", 0, "how often policies are loaded under load; 0: a thousand times, or thirty with -short")

// TestFamily tries which programs are trusted, and then loads policies many times: there is no moment without
// protection.
func TestFamily(t *testing.T) {
	b := newBench(t)
	f := b.newFamily()
	g := b.start(policy.Policy{Rules: f.rules()})
	told := b.listen(g)
	t.Run("trust", f.test)
	times := *reloadsFlag
	switch {
	case times > 0:
	case testing.Short():
		times = 30
	default:
		times = 1000
	}
	began := time.Now()
	t.Run("no window", func(t *testing.T) { f.reload(t, g, times) })
	status, err := Look(kernel.DefaultPinRoot)
	if err != nil {
		t.Fatal(err)
	}
	if status.Missed+status.Untrusted > 0 {
		t.Errorf("%d operations not examined, %d processes without trust", status.Missed, status.Untrusted)
	}
	for _, a := range told() {
		if a.Program == f.path("test/bin/app") && a.Path == f.path("test/data") && a.Time.After(began) {
			t.Logf("a trusted program was refused: %s", a)
		}
	}
}
