package ping

import "math"

// driftMax is the largest rate at which two clocks drift apart, in ns per ns, without counting as a jump. Crystals of
// computers are within 50 ppm of their frequency.
const driftMax = 100e-6

// clock estimates how far the server's clock is ahead of the client's.
//
// A packet needs time in both directions, so each probe bounds the offset: it is at most (server receive − client sends) and
// at least (server sends − client receives). The bounds of earlier probes count too, widened by the largest drift
// since. The offset is the middle of the tightest bounds, so its error is at most half of the smallest
// round trip between the hosts, and no direction takes less than no time.
type clock struct {
	known        bool
	lower, upper int64 // ns: of the offset, at the time
	time         int64 // ns of the client's clock
	jumps        int   // probes that contradicted the earlier ones
	best         sample
	fit          fit
}

type sample struct{ time, offset, err int64 }

// sampleNs is the time whose best sample enters the drift.
const sampleNs = int64(1e9)

// add takes a probe that the client sent at out and whose answer it received at back, and that the server received and
// answered. It returns the offset at back and its largest error, in ns; false: the stamps contradict each other.
func (c *clock) add(out, receive, answer, back int64) (offset, err int64, ok bool) {
	// The server received it some time ago, and the clocks may have drifted since.
	lower, upper := answer-back, receive-out+drifted(back-out)
	if lower > upper {
		return 0, 0, false
	}
	if c.known {
		drift := drifted(back - c.time)
		c.lower, c.upper = max(c.lower-drift, lower), min(c.upper+drift, upper)
	}
	if c.known && c.lower > c.upper {
		c.jumps++
		c.known = false
		c.fit, c.best = fit{}, sample{}
	}
	if !c.known {
		c.known, c.lower, c.upper = true, lower, upper
	}
	c.time = back
	// Halves of an odd width are rounded up: the error is a bound.
	now := sample{back, c.lower + (c.upper-c.lower)/2, (c.upper - c.lower + 1) / 2}
	if c.best.time != 0 && back-c.best.time >= sampleNs {
		c.fit.add(c.best)
		c.best = sample{}
	}
	if c.best.time == 0 || now.err < c.best.err {
		c.best = now
	}
	return now.offset, now.err, true
}

// drifted returns the largest possible drift of two clocks in a time, in ns, rounded up.
func drifted(ns int64) int64 { return int64(math.Ceil(driftMax * math.Abs(float64(ns)))) }

// bridge converts times of the server's clock between receive and answer to the client's. The offset is that of back;
// if the clocks drift while the server has the probe, the offset moves from the value that the way out allows to the
// value that the way back allows, so the correction is spread over all stages.
func bridge(offset, out, receive, answer, back int64) func(ns int64) int64 {
	begin, end := min(offset, receive-out), max(offset, answer-back)
	return func(ns int64) int64 {
		if answer <= receive || ns <= receive {
			return ns - begin
		}
		if ns >= answer {
			return ns - end
		}
		return ns - begin - int64(float64(end-begin)*(float64(ns-receive)/float64(answer-receive)))
	}
}

// between moves an offset so that a host's times from and to are not before one time of the client's, nor after another;
// if both is not possible, the later limit counts.
func between(offset, from, to, notBefore, notAfter int64) int64 {
	return max(min(offset, from-notBefore), to-notAfter)
}

// placeBalancer converts a balancer's points to the client's clock, between the points beside them, which are the client's or have been
// converted. Its clock has bounds of its own. If the balancer saw only the probe, the round trip bounds them: then the position
// of its stage between the wires is not known more exactly, but its length is. false: the stamps contradict each other.
func placeBalancer(c *clock, points []int64, told *Clock) bool {
	out, back := first(points, clientDriver, clientSent), first(points, clientReceive, clientUser)
	offset, err, ok := c.add(out, points[balancerTook], first(points, balancerDoneAnswer, balancerTook), back)
	*told = Clock{offset, err}
	next := first(points, serverReceive, serverDriver)
	if next == 0 {
		next = back
	}
	by := between(offset, points[balancerTook], points[balancerDone], out, next)
	points[balancerTook], points[balancerDone] = points[balancerTook]-by, points[balancerDone]-by
	if points[balancerTookAnswer] != 0 {
		before := first(points, serverDriver, balancerDone)
		by = between(offset, points[balancerTookAnswer], points[balancerDoneAnswer], before, back)
		points[balancerTookAnswer], points[balancerDoneAnswer] = points[balancerTookAnswer]-by, points[balancerDoneAnswer]-by
	}
	return ok
}

// here returns a function that converts a time of the server's clock to the client's, if other probes allow it; nil: they do not.
func (c *clock) here() func(ns int64) int64 {
	if !c.known {
		return nil
	}
	middle := c.lower + (c.upper-c.lower)/2
	return func(ns int64) int64 { return ns - middle }
}

// drift returns the rate by which the server's clock is faster, in ns per ns, and its largest error; false: the run was too short.
func (c *clock) drift() (rate, err float64, ok bool) { return c.fit.rate() }

// fit is the line through samples with the least squares.
type fit struct {
	n, t, o, tt, to float64
	first, last     sample
}

func (f *fit) add(s sample) {
	if f.n == 0 {
		f.first = s
	}
	f.last = s
	t, o := float64(s.time-f.first.time), float64(s.offset-f.first.offset)
	f.n, f.t, f.o, f.tt, f.to = f.n+1, f.t+t, f.o+o, f.tt+t*t, f.to+t*o
}

func (f *fit) rate() (rate, err float64, ok bool) {
	width := f.n*f.tt - f.t*f.t
	if f.n < 3 || width <= 0 {
		return 0, 0, false
	}
	return (f.n*f.to - f.t*f.o) / width, float64(f.first.err+f.last.err) / float64(f.last.time-f.first.time), true
}
