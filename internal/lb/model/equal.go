package model

import "slices"

// Equal reports whether two services are equal. It does not compare lists that they share, so it costs little
// if most services are unchanged; a list that another service holds must not be changed.
func (s *Service) Equal(o *Service) bool {
	return s.Name == o.Name && s.Pool == o.Pool && s.Source == o.Source && s.Forwarding == o.Forwarding && s.Announce == o.Announce &&
		s.TableSize == o.TableSize && s.Tracking == o.Tracking && s.AffinityTimeout == o.AffinityTimeout && s.ClosesDown == o.ClosesDown && s.Policy == o.Policy &&
		sameList(s.Frontends, o.Frontends) && sameList(s.Backends, o.Backends) && sameList(s.Names, o.Names) &&
		sameList(s.AllowFrom, o.AllowFrom) && sameList(s.DenyFrom, o.DenyFrom) && s.Health.equal(&o.Health)
}

func (h *Health) equal(o *Health) bool {
	return h.Check == o.Check && h.Port == o.Port && h.Interval == o.Interval && h.Timeout == o.Timeout &&
		h.Rise == o.Rise && h.Fall == o.Fall && h.Jitter == o.Jitter && h.SlowStart == o.SlowStart && h.Panic == o.Panic &&
		h.HTTP.Path == o.HTTP.Path && h.HTTP.Host == o.HTTP.Host && h.HTTP.Body == o.HTTP.Body && sameList(h.HTTP.Statuses, o.HTTP.Statuses) &&
		h.TLS == o.TLS && h.GRPC == o.GRPC && h.UDP == o.UDP && sameList(h.Exec, o.Exec)
}

// sameList compares lists; nil equals an empty list.
func sameList[T comparable](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.Equal(a, b))
}
