package spread

import "testing"

func TestOf(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   Spread
	}{
		{[]float64{3}, Spread{3, 3, 3}}, {[]float64{9, 1, 5}, Spread{5, 1, 9}},
		{[]float64{4, 1, 2, 9}, Spread{3, 1, 9}},
	} {
		if got := Of(test.values); got != test.want {
			t.Errorf("%v: %+v, want %+v", test.values, got, test.want)
		}
		if got := Median(test.values); got != test.want.Median {
			t.Errorf("median of %v is %v, want %v", test.values, got, test.want.Median)
		}
	}
	if got := Median(nil); got != 0 {
		t.Errorf("median of nothing is %v", got)
	}
}

func TestText(t *testing.T) {
	if got := Of([]float64{9, 1, 5}).Text("%.1f"); got != "5.0 [1.0 to 9.0]" {
		t.Error(got)
	}
}
