package trial

import (
	"slices"

	"github.com/shunt-lb/shunt/internal/guard/judge"
)

// AnswerOf returns the answer of an explanation for an operation; zero: there is none.
func AnswerOf(e *judge.Explanation, operation string) judge.Answer {
	i := slices.IndexFunc(e.Operations, func(a judge.Answer) bool { return a.Operation == operation })
	if i < 0 {
		return judge.Answer{}
	}
	return e.Operations[i]
}

// WhyOf returns the reason why a rule trusts the process of an explanation or does not; empty: there is none.
func WhyOf(e *judge.Explanation, rule string) string {
	for _, r := range slices.Concat(e.Process.Trusted, e.Process.Untrusted) {
		if r.Rule == rule {
			return r.Why
		}
	}
	return ""
}
