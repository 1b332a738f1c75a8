package broker

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/shunt-lb/shunt/internal/udp/proto"
)

// FuzzClaims: for any claims of programs, in any order, no number shrinks, and a number that is not claimed does not grow.
func FuzzClaims(f *testing.F) {
	report := func(numbers ...uint64) (text []byte) {
		for _, n := range numbers {
			text = binary.LittleEndian.AppendUint64(text, n)
		}
		return text
	}
	f.Add(report(1, 2, 3, 4, 5, 6, 7, 8))
	f.Add(report(9, 9, 9, 9, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2))
	f.Add(report(math.MaxUint64, 0, 0, 0, math.MaxUint64, 0, 0, 0, 1, 0, 0, 0, 1))
	f.Fuzz(func(t *testing.T, text []byte) {
		const size = 2 * 32 // a report of two queues
		var past *proto.Claim
		var s session
		before := proto.Claim{}
		for n := 0; len(text) >= size; n++ {
			var claims [2]proto.Claim
			if _, err := binary.Decode(text[:size], binary.LittleEndian, &claims); err != nil {
				t.Fatal(err)
			}
			text = text[size:]
			s.claim(claims[:])
			now := *s.claimed(past)
			for _, c := range claims {
				if each(now, c, larger) != now {
					t.Fatalf("%+v is claimed of a queue, and the sum is %+v", c, now)
				}
			}
			if each(before, now, larger) != now {
				t.Fatalf("the sum was %+v, and now is %+v", before, now)
			}
			if now.Kicks > 0 && before.Kicks == 0 && claims[0].Kicks == 0 && claims[1].Kicks == 0 {
				t.Fatalf("%+v are claimed, and the sum is %+v", claims, now)
			}
			before = now
			if n%3 == 2 { // another lease
				past = s.claimed(past)
				s = session{}
				if again := s.claimed(past); *again != before {
					t.Fatalf("a lease has ended, and the sum is %+v; it was %+v", *again, before)
				}
			}
		}
	})
}
