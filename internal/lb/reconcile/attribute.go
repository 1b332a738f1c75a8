package reconcile

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/value"
)

// attribute is one value of a service; name and value are written as in the configuration.
type attribute struct{ name, value string }

const none = "none"

// recordAttributes returns the attributes that a service's record holds, so that an adopted service has them
// too.
func recordAttributes(s *model.Service) []attribute {
	return append([]attribute{
		{"forwarding", string(s.Forwarding)},
		{"tracking", string(trackingOf(s))},
		{"affinity_timeout", durationText(s.AffinityTimeout)},
	}, policyAttributes(s.Policy)...)
}

// policyAttributes returns the attributes of a policy, except for its filters, which the rules describe.
func policyAttributes(p model.Policy) []attribute {
	choose := func(yes bool, word, otherwise string) string {
		if yes {
			return word
		}
		return otherwise
	}
	bound := func(n uint32) string { return choose(n > 0, strconv.Itoa(int(n)), none) }
	return []attribute{
		{"on_no_backend", choose(p.Rejects, "reject", "drop")},
		{"hash", choose(p.HashAddresses, "addresses", "flow")},
		{"affinity_choice", choose(p.Draws, "drawn", "by address")},
		{"inside", choose(p.Inside, "another service", none)},
		{"tunnelled", choose(p.Tunnelled, "another service", none)},
		{"begun_before", choose(p.PassesBegun, "pass", "take")},
		{"max_flows", bound(p.FlowsMax)},
		{"max_new_flows_per_source", choose(p.SourceRate > 0, fmt.Sprintf("%d/s", p.SourceRate), none)},
		{"tcp_mss", bound(uint32(p.TCPMSS))},
	}
}

// serviceAttributes returns all attributes of a service for which a Difference has no field. An attribute that
// the service does not have is absent, or none.
func serviceAttributes(s *model.Service) []attribute {
	return append(append(recordAttributes(s), attribute{"pool", cmp.Or(s.Pool, none)}, attribute{"dns", cmp.Or(model.ListText(s.Names), none)}, attribute{"announce", string(s.Announce)}, attribute{"on_down", onDown(s)}), healthAttributes(s.Health)...)
}

func onDown(s *model.Service) string {
	if s.ClosesDown {
		return "close"
	}
	return "keep"
}

func passOr(passes bool) string {
	if passes {
		return "pass"
	}
	return "fail"
}

func healthAttributes(h model.Health) []attribute {
	if h.Check == "" {
		return []attribute{{"health", none}}
	}
	own := "health." + string(h.Check) + "."
	all := []attribute{
		{"health", string(h.Check)},
		{own + "port", cmp.Or(portText(h.Port), "the backend's")},
		{"health.interval", value.DurationText(h.Interval)},
		{"health.timeout", value.DurationText(h.Timeout)},
		{"health.fall", strconv.Itoa(int(h.Fall))},
		{"health.rise", strconv.Itoa(int(h.Rise))},
		{"health.jitter", fmt.Sprintf("%d%%", h.Jitter)},
		{"health.slow_start", durationText(h.SlowStart)},
		{"health.panic", fmt.Sprintf("%d%%", h.Panic)},
	}
	switch h.Check {
	case model.CheckHTTP, model.CheckHTTPS:
		all = append(all,
			attribute{own + "path", h.HTTP.Path},
			attribute{own + "host", cmp.Or(h.HTTP.Host, "address and port")},
			attribute{own + "status", model.ListText(h.HTTP.Statuses)},
			attribute{own + "body", cmp.Or(quoted(h.HTTP.Body), "anything")})
	case model.CheckGRPC:
		all = append(all, attribute{own + "service", cmp.Or(h.GRPC.Service, "the server as a whole")})
	case model.CheckUDP:
		all = append(all, attribute{own + "send", quoted(h.UDP.Send)}, attribute{own + "expect", cmp.Or(quoted(h.UDP.Expect), "anything")},
			attribute{own + "silence", passOr(h.UDP.SilencePasses)})
	case model.CheckExec:
		all = append(all, attribute{own + "command", fmt.Sprintf("%q", h.Exec)})
	case model.CheckTCP:
	}
	if h.Check == model.CheckHTTPS {
		all = append(all,
			attribute{own + "server_name", cmp.Or(h.TLS.ServerName, "that of host")},
			attribute{own + "verify", strconv.FormatBool(!h.TLS.NoVerify)},
			attribute{own + "ca_file", cmp.Or(h.TLS.CAFile, "the machine's")})
	}
	return all
}

// durationText returns the duration as text, and none for 0.
func durationText(d time.Duration) string {
	if d == 0 {
		return none
	}
	return value.DurationText(d)
}

// quoted returns the text in quotation marks, and "" for "".
func quoted(text string) string {
	if text == "" {
		return ""
	}
	return strconv.Quote(text)
}

func portText(port uint16) string {
	if port == 0 {
		return ""
	}
	return strconv.Itoa(int(port))
}

// differentAttributes returns the attributes in which two services differ.
func differentAttributes(before, after *model.Service, adopted bool) []AttributeDifference {
	if adopted {
		return compareAttributes(recordAttributes(before), recordAttributes(after))
	}
	return compareAttributes(serviceAttributes(before), serviceAttributes(after))
}

// compareAttributes returns the attributes that both services have with different values, in the order of
// after.
func compareAttributes(before, after []attribute) (differences []AttributeDifference) {
	was := map[string]string{}
	for _, a := range before {
		was[a.name] = a.value
	}
	for _, a := range after {
		if value, known := was[a.name]; known && value != a.value {
			differences = append(differences, AttributeDifference{a.name, value, a.value})
		}
	}
	return differences
}
