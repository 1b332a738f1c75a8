package model

import "slices"

// Equal reports whether two services say the same. Lists that they share are not looked at, so
// it costs little where most services are as before; nobody may change a list that another
// holds.
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

// sameList compares lists; nil is an empty one.
func sameList[T comparable](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.Equal(a, b))
}
