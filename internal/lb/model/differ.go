package model

// Shared is services as the desired state holds them. Nobody changes a service that is in such a list, and a change
// puts another in its place: what is the same pointer is the same service, and a list of 10,000 is 80 KB.
func Shared(services []Service) []*Service {
	shared := make([]*Service, len(services))
	for i := range services {
		service := services[i]
		shared[i] = &service
	}
	return shared
}

// Changed are the services that only one of two lists has: gone in the order of before, come in the
// order of after. What stays costs one comparison of pointers, where most services keep their place.
func Changed(before, after []*Service) (gone, come []*Service) {
	for len(before) > 0 && len(after) > 0 && before[0] == after[0] {
		before, after = before[1:], after[1:]
	}
	for len(before) > 0 && len(after) > 0 && before[len(before)-1] == after[len(after)-1] {
		before, after = before[:len(before)-1], after[:len(after)-1]
	}
	if len(before) != len(after) {
		return without(before, after), without(after, before)
	}
	for i := range before {
		if before[i] != after[i] {
			gone, come = append(gone, before[i]), append(come, after[i])
		}
	}
	return without(gone, come), without(come, gone) // services may only have changed places
}

// without is the services of a list that another does not have.
func without(list, other []*Service) []*Service {
	if len(list) == 0 || len(other) == 0 {
		return list
	}
	has := make(map[*Service]bool, len(other))
	for _, s := range other {
		has[s] = true
	}
	var left []*Service
	for _, s := range list {
		if !has[s] {
			left = append(left, s)
		}
	}
	return left
}

// Differ tells how each list of services differs from the one before, which at first is empty. What
// follows from services one by one can be kept so, and costs what changes.
type Differ struct {
	list     []*Service
	services map[string]*Service
}

// Next takes a list of shared services in which no two have the same name. gone are services that are not in it, or
// not like this any more, as they were; come are the services that are new or different, in the list's
// order. Another service that says the same is neither.
func (d *Differ) Next(list []*Service) (gone, come []*Service) {
	if d.services == nil {
		d.services = map[string]*Service{}
	}
	left, fresh := Changed(d.list, list)
	d.list = list
	replaced := map[*Service]bool{} // gone already, or there again under another pointer
	for _, next := range fresh {
		if known := d.services[next.Name]; known != nil {
			replaced[known] = true
			if !known.Equal(next) {
				gone, come = append(gone, known), append(come, next)
			}
		} else {
			come = append(come, next)
		}
		d.services[next.Name] = next
	}
	for _, known := range left {
		if !replaced[known] {
			gone = append(gone, known)
			delete(d.services, known.Name)
		}
	}
	return gone, come
}
