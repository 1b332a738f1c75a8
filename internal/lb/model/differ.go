package model

// Differ tells how each list of services differs from the one before, which at first is empty. What
// follows from services one by one can be kept so, and costs what changes.
type Differ struct {
	services map[string]*listed
	round    uint
}

type listed struct {
	service Service
	round   uint // of the last list that had it
}

// Next takes a list in which no two services share a name. gone are services that are not in it, or
// not like this any more, as they were; come are those that are new or different, in the list's
// order. Both are for reading alone, and so is the list from now on: see Service.Equal.
func (d *Differ) Next(services []Service) (gone, come []*Service) {
	if d.services == nil {
		d.services = map[string]*listed{}
	}
	d.round++
	found := 0
	for i := range services {
		next := &services[i]
		known, ok := d.services[next.Name]
		if ok {
			found++
			known.round = d.round
			if known.service.Equal(next) {
				known.service = *next // so that the next comparison meets the lists that it has in hand
				continue
			}
			was := known.service
			gone = append(gone, &was)
			known.service = *next
		} else {
			d.services[next.Name] = &listed{*next, d.round}
			found++
		}
		come = append(come, next)
	}
	if found < len(d.services) {
		for name, known := range d.services {
			if known.round != d.round {
				gone = append(gone, &known.service)
				delete(d.services, name)
			}
		}
	}
	return gone, come
}
