package model_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

func TestDiffer(t *testing.T) {
	service := func(name string, weights ...uint16) model.Service {
		s := model.Service{Name: name}
		for _, weight := range weights {
			s.Backends = append(s.Backends, model.Backend{Weight: weight})
		}
		return s
	}
	words := func(services []*model.Service) string {
		var all []string
		for _, s := range services {
			word := s.Name
			for _, b := range s.Backends {
				word += string(rune('0' + b.Weight))
			}
			all = append(all, word)
		}
		return strings.Join(all, " ")
	}
	var d model.Differ
	for _, step := range []struct {
		what       string
		list       []model.Service
		gone, come string
	}{
		{"all are new", []model.Service{service("b", 1), service("a", 1, 2)}, "", "b1 a12"},
		{"the same in another order", []model.Service{service("a", 1, 2), service("b", 1)}, "", ""},
		{"one is different", []model.Service{service("a", 1, 3), service("b", 1)}, "a12", "a13"},
		{"one goes, one comes, one is different", []model.Service{service("c"), service("a", 4)}, "a13 b1", "c a4"},
		{"none", nil, "a4 c", ""},
		{"again none", nil, "", ""},
		{"one is back", []model.Service{service("a", 4)}, "", "a4"},
	} {
		gone, come := d.Next(model.Shared(step.list))
		slices.SortFunc(gone, func(a, b *model.Service) int { return strings.Compare(a.Name, b.Name) })
		if words(gone) != step.gone || words(come) != step.come {
			t.Errorf("%s: gone %q, come %q; want %q, %q", step.what, words(gone), words(come), step.gone, step.come)
		}
	}
}
