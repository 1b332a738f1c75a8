package model

// Shared are services as the desired state holds them. A service in such a list is never changed; a change
// replaces it by another: an equal pointer means an equal service, and a list of 10,000 takes 80 KB.
func Shared(services []Service) []*Service {
	shared := make([]*Service, len(services))
	for i := range services {
		service := services[i]
		shared[i] = &service
	}
	return shared
}

// Changed returns the services that only one of two lists has: gone in the order of before, come in the order
// of after. An unchanged service costs one comparison of pointers, if most services keep their position.
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
	return without(gone, come), without(come, gone) // services may only have changed positions
}

// without returns the services of a list that another list does not have.
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

// Differ finds the difference between each list of services and the one before, which is empty at first. Data
// that follow from single services can be kept up to date with it, at a cost that depends on the changes.
type Differ struct {
	list     []*Service
	services map[string]*Service
}

// Next takes a list of shared services in which no two have the same name. gone are the services that are not
// in it any more or have changed, in their old form; come are the services that are new or have changed, in the
// list's order. A different pointer to an equal service is in neither.
func (d *Differ) Next(list []*Service) (gone, come []*Service) {
	if d.services == nil {
		d.services = map[string]*Service{}
	}
	left, fresh := Changed(d.list, list)
	d.list = list
	replaced := map[*Service]bool{} // services that are gone, or equal to a service under another pointer
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
