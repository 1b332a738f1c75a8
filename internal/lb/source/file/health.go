package file

import (
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// timeoutUsual is health.timeout if neither it nor a shorter interval is set.
const timeoutUsual = time.Second

// checkOf is one kind of check in a health mapping.
type checkOf struct {
	kind model.HealthCheck
	mark *config.Mark
	port *config.Number // nil: it has none
}

// checksOf lists the kinds of checks that the file names.
func (h *healthEntry) checksOf() (named []checkOf) {
	for _, c := range []checkOf{
		{model.CheckTCP, &h.TCP.Mark, &h.TCP.Port},
		{model.CheckHTTP, &h.HTTP.Mark, &h.HTTP.Port},
		{model.CheckHTTPS, &h.HTTPS.Mark, &h.HTTPS.Port},
		{model.CheckGRPC, &h.GRPC.Mark, &h.GRPC.Port},
		{model.CheckUDP, &h.UDP.Mark, &h.UDP.Port},
		{model.CheckExec, &h.Exec.Mark, nil},
	} {
		if c.mark.Set {
			named = append(named, c)
		}
	}
	return named
}

// oneCheck returns the single kind of check in a health mapping, if it has one. More than one is an error,
// reported once for each mapping.
func (b *builder) oneCheck(h *healthEntry) (check checkOf, is bool) {
	named := h.checksOf()
	if len(named) == 0 {
		return checkOf{}, false
	}
	if len(named) > 1 {
		b.parsed.faults.Errorf(*named[1].mark, "keep one of them", "health has %s and %s: a backend is checked in one way", named[0].kind, named[1].kind)
	}
	return named[0], true
}

// health sets how the service's backends are checked.
func (b *builder) health(entry *serviceEntry, defaults *healthEntry, s *model.Service) {
	own := &entry.Health
	faults := b.parsed.faults
	enabled := ownElse(&own.Enabled, &defaults.Enabled)
	if !own.Set && !defaults.Set || !enabled.Value {
		b.unchecked(entry, s)
		return
	}
	from := own
	check, is := b.oneCheck(own)
	if !is {
		from = defaults
		check, is = b.oneCheck(defaults)
	}
	switch {
	case is:
	case own.Set:
		if !own.Bad {
			faults.Errorf(own.Mark, "add for example tcp: {}", "health does not say how to check: want one of tcp, http, https, grpc, udp and exec")
		}
		return
	default: // intervals for services that do
		b.unchecked(entry, s)
		return
	}
	h := model.Health{
		Check:     check.kind,
		Interval:  ownElse(&own.Interval, &defaults.Interval).Value,
		Timeout:   ownElse(&own.Timeout, &defaults.Timeout).Value,
		Rise:      uint32(ownElse(&own.Rise, &defaults.Rise).Value),
		Fall:      uint32(ownElse(&own.Fall, &defaults.Fall).Value),
		Jitter:    ownElse(&own.Jitter, &defaults.Jitter).Value,
		SlowStart: ownElse(&own.SlowStart, &defaults.SlowStart).Value,
		Panic:     ownElse(&own.Panic, &defaults.Panic).Value,
	}
	if check.port != nil {
		h.Port = uint16(check.port.Value)
	}
	if timeout := ownElse(&own.Timeout, &defaults.Timeout); h.Timeout == 0 {
		h.Timeout = min(timeoutUsual, h.Interval)
	} else if h.Timeout > h.Interval && !timeout.Bad {
		faults.Errorf(timeout.Mark, "shorten it, or lengthen interval", "health.timeout %s is longer than the interval, %s", timeout.Text, h.Interval)
	}
	b.check(from, &h)
	b.checkedPort(entry, s, check, &h)
	s.Health = h
}

// ownElse returns the service's value, or else the defaults', or else the usual one.
func ownElse[T any, P interface {
	*T
	Where() *config.Mark
}](own, inherited P) P {
	if own.Where().Set {
		return own
	}
	return inherited
}

// check sets the fields of one kind of check.
func (b *builder) check(from *healthEntry, h *model.Health) {
	faults := b.parsed.faults
	page := func(path, host *config.Text, status []statuses, body *config.Phrase) {
		if !strings.HasPrefix(path.Value, "/") && !path.Bad {
			faults.Errorf(path.Mark, "write /"+path.Value, "path %q does not begin with /", path.Value)
		}
		h.HTTP = model.HealthHTTP{Path: path.Value, Host: host.Value, Body: body.Value}
		for _, s := range status {
			h.HTTP.Statuses = append(h.HTTP.Statuses, s.Value)
		}
	}
	switch h.Check {
	case model.CheckHTTP:
		e := &from.HTTP
		page(&e.Path, &e.Host, e.Status.Items, &e.Body)
	case model.CheckHTTPS:
		e := &from.HTTPS
		page(&e.Path, &e.Host, e.Status.Items, &e.Body)
		h.TLS = model.HealthTLS{ServerName: e.ServerName.Value, NoVerify: !e.Verify.Value, CAFile: e.CAFile.Value}
		if e.CAFile.Set && !e.CAFile.Bad {
			if h.TLS.NoVerify {
				faults.Warnf(e.CAFile.Mark, "remove ca_file, or remove verify: false", "with verify: false ca_file is not used")
			} else {
				b.need(Host.Authorities, e.CAFile.Value, e.CAFile.Mark)
			}
			if !strings.HasPrefix(e.CAFile.Value, "/") {
				faults.Errorf(e.CAFile.Mark, "write the absolute path", "ca_file %q is not an absolute path", e.CAFile.Value)
			}
		}
	case model.CheckGRPC:
		h.GRPC.Service = from.GRPC.Service.Value
	case model.CheckUDP:
		h.UDP = model.HealthUDP{Send: from.UDP.Send.Value, Expect: from.UDP.Expect.Value, SilencePasses: from.UDP.Silence.Value == "pass"}
	case model.CheckExec:
		for i, word := range from.Exec.Command.Items {
			if i == 0 && !strings.HasPrefix(word.Value, "/") {
				faults.Errorf(word.Mark, "write the absolute path", "%q is not the absolute path of a program", word.Value)
			} else if i == 0 {
				b.need(Host.Program, word.Value, word.Mark)
			}
			h.Exec = append(h.Exec, word.Value)
		}
	}
}

// need records a file that a check needs, at the first position in the configuration that names it.
func (b *builder) need(use func(Host, string) error, path string, m config.Mark) {
	if !slices.ContainsFunc(b.parsed.needs, func(n need) bool { return n.path == path }) {
		b.parsed.needs = append(b.parsed.needs, need{use, path, m})
	}
}

// checkedPort reports checks without a known port.
func (b *builder) checkedPort(entry *serviceEntry, s *model.Service, check checkOf, h *model.Health) {
	if check.port == nil || check.port.Set || !entry.Port.Set || entry.Port.Bad {
		return
	}
	ports := map[value.PortRange]bool{}
	for _, p := range entry.Port.Items {
		ports[p.Value] = true
	}
	if len(ports) == 1 && entry.Port.Items[0].Value.Exact() {
		return
	}
	if slices.ContainsFunc(s.Backends, func(b model.Backend) bool { return b.Port == 0 && b.CheckAt.Port == 0 }) ||
		slices.ContainsFunc(s.Names, func(n model.BackendName) bool { return n.Port == 0 && n.CheckPort == 0 }) {
		b.parsed.faults.Errorf(*check.mark, "give "+string(check.kind)+" a port", "there is no single port to check: the backends of service %q have no port of their own, and the service has several", s.Name)
	}
}

// unchecked is for a service without checks: health settings of its backends have no effect, and nothing
// detects that backups are needed.
func (b *builder) unchecked(entry *serviceEntry, s *model.Service) {
	for i := range entry.Backends.Items {
		if at := &entry.Backends.Items[i].Health; at.Set && !at.Bad {
			b.parsed.faults.Warnf(at.Mark, "add health to the service, or remove it here", "service %q is not checked: health of a backend has no effect", s.Name)
			break
		}
	}
	for i := range entry.Backends.Items {
		if backup := &entry.Backends.Items[i].Backup; backup.Value {
			b.parsed.faults.Warnf(backup.Mark, "add health", "service %q is not checked: its backups serve only while all its other backends are drained or have weight 0", s.Name)
			return
		}
	}
}

// Unchecked names the services whose backends count as up because they are not checked.
func (p *Parsed) Unchecked() (names []string) {
	for _, s := range p.Config.Services {
		if s.Health.Check == "" {
			names = append(names, s.Name)
		}
	}
	return names
}
