package main

import "time"

// figures are one manner's, from the first replacement to an interval after the last.
type figures struct {
	alive, tracked, remembered float64 // averages
	peak                       sample  // where most are remembered
	ofAlive, ofTracked         float64 // the largest share at any moment
	last                       int     // remembered at the end
	average                    kinds
}

// kinds has the numbers of remembered entries by kind.
type kinds struct {
	agreeing, differing, elsewhere, over, overOpen float64
}

func kindsOf(s sample) kinds {
	return kinds{float64(s.agreeing), float64(s.differing), float64(s.elsewhere), float64(s.over), float64(s.overOpen)}
}

func (r *result) figures(from, to time.Duration) figures {
	var f figures
	count := 0.0
	for _, s := range r.samples {
		f.last = s.remembered
		if s.at <= from || s.at > to {
			continue
		}
		count++
		f.alive += float64(s.alive)
		f.tracked += float64(s.tracked)
		f.remembered += float64(s.remembered)
		k := kindsOf(s)
		f.average.agreeing += k.agreeing
		f.average.differing += k.differing
		f.average.elsewhere += k.elsewhere
		f.average.over += k.over
		f.average.overOpen += k.overOpen
		if s.remembered > f.peak.remembered {
			f.peak = s
		}
		f.ofAlive = max(f.ofAlive, float64(s.remembered)/float64(s.alive))
		f.ofTracked = max(f.ofTracked, float64(s.remembered)/float64(s.tracked))
	}
	for _, value := range []*float64{&f.alive, &f.tracked, &f.remembered, &f.average.agreeing, &f.average.differing,
		&f.average.elsewhere, &f.average.over, &f.average.overOpen} {
		*value /= count
	}
	return f
}
