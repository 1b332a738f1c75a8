package translate

import (
	"slices"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// announce notes the addresses of a port that are to be announced. Those of another port may be the same.
func (s *translation) announce(service *model.Service) {
	here := service.Announce == model.AnnounceL2
	for _, f := range service.Frontends {
		at := slices.IndexFunc(s.announced, func(a Announcement) bool { return a.Address == f.Address })
		if at < 0 {
			at = len(s.announced)
			s.announced = append(s.announced, Announcement{Address: f.Address})
		}
		s.announced[at].Here = s.announced[at].Here || here
	}
}
