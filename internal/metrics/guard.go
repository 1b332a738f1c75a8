package metrics

// Guard is the state of `shunt guard run`.
type Guard struct {
	Features    []GuardFeature
	SwitchedOff []string // features and rules, by hand
	Thinned     []GuardThinned
	Lines       []GuardLines
	Decoys      []Count // by state
	Connections []Count // by verdict, since a policy first denied some; nil: none does
	// Enforced reports whether the kernel enforces a policy; the counts are the policy's, since protection
	// began.
	Enforced                                     bool
	Denied, Audited, Unheard, Unexamined, NoRoom uint64
	Opens                                        *GuardOpens // nil: no opens wait
	// MaxCPU is a share of one CPU; 0: no limit.
	MaxCPU    float64
	Throttled uint64
}

// GuardFeature is a feature of the guard.
type GuardFeature struct {
	Name                  string
	On, Failed            bool // Failed: it is off although the policy asks for it and it was not switched off by hand
	Rules                 uint64
	Events, Missed, Alert uint64
	Lost                  []Count // by stream
}

// GuardOpens is the state of protection by opens that wait for the process, without BPF LSM.
type GuardOpens struct {
	Waited, Denied, Audited, Late, Unsure, Unread uint64
	Took                                          float64 // seconds of all answers
	Files                                         uint64  // remembered files and folders
}

// GuardThinned is a type of events of which some are left out.
type GuardThinned struct {
	Type    string
	Kept    float64 // the share
	LeftOut uint64
}

// GuardLines count lines that were written, or lost because the writer was slower.
type GuardLines struct {
	Class      string
	Told, Lost uint64
}

// guardFamilies are present in `shunt guard run`.
var guardFamilies = []Family{
	{"shunt_guard_feature_on", Gauge, []string{"feature"}, "1 if protection, connections, detection or decoys are on, else 0.",
		guardFeatures(func(e *exposition, f *GuardFeature) { e.whole(labels("feature", f.Name), flag(f.On)) })},
	{"shunt_guard_feature_failed", Gauge, []string{"feature"}, "1 if a feature is off although the policy asks for it and nobody switched it off, as on a kernel that enforces no rule; else 0.",
		guardFeatures(func(e *exposition, f *GuardFeature) { e.whole(labels("feature", f.Name), flag(f.Failed)) })},
	{"shunt_guard_switched_off", Gauge, []string{"name"}, "1. A feature, or a rule as FEATURE/RULE, that is switched off by hand.",
		func(e *exposition, s *Sample) {
			for _, name := range s.Guard.SwitchedOff {
				e.whole(labels("name", name), 1)
			}
		}},
	{"shunt_guard_rules", Gauge, []string{"feature"}, "Rules of a feature.",
		guardFeatures(func(e *exposition, f *GuardFeature) { e.whole(labels("feature", f.Name), f.Rules) })},
	{"shunt_guard_events_total", Counter, []string{"feature"}, "Events that a feature has read.",
		guardFeatures(func(e *exposition, f *GuardFeature) { e.whole(labels("feature", f.Name), f.Events) })},
	{"shunt_guard_events_lost_total", Counter, []string{"feature", "stream"}, "Events that found no room in the buffer of their stream.",
		guardFeatures(func(e *exposition, f *GuardFeature) {
			for _, c := range f.Lost {
				e.whole(labels("feature", f.Name, "stream", c.Of), c.Count)
			}
		})},
	{"shunt_guard_runs_missed_total", Counter, []string{"feature"}, "Runs of a feature's programs that the kernel left out.",
		guardFeatures(func(e *exposition, f *GuardFeature) { e.whole(labels("feature", f.Name), f.Missed) })},
	{"shunt_guard_alerts_total", Counter, []string{"feature"}, "Denials, and findings of rules whose action is not log.",
		guardFeatures(func(e *exposition, f *GuardFeature) { e.whole(labels("feature", f.Name), f.Alert) })},
	{"shunt_guard_events_kept_ratio", Gauge, []string{"type"}, "The share of events of a type that detection keeps now, to save CPU. Absent if detection never left out any.",
		guardThinned(func(e *exposition, t *GuardThinned) { e.number(labels("type", t.Type), t.Kept) })},
	{"shunt_guard_events_left_out_total", Counter, []string{"type"}, "Events of a type that detection has left out, to save CPU.",
		guardThinned(func(e *exposition, t *GuardThinned) { e.whole(labels("type", t.Type), t.LeftOut) })},
	{"shunt_guard_lines_total", Counter, []string{"class"}, "Lines that were written: alerts, and notes (all other lines).",
		guardLines(func(e *exposition, l *GuardLines) { e.whole(labels("class", l.Class), l.Told) })},
	{"shunt_guard_lines_lost_total", Counter, []string{"class"}, "Lines that were not written because the reader of the output, or the disk, was too slow. Alerts and notes have queues of their own.",
		guardLines(func(e *exposition, l *GuardLines) { e.whole(labels("class", l.Class), l.Lost) })},
	{"shunt_guard_decoys", Gauge, []string{"state"}, "Decoys by state: stand, changed, gone, unknown. Absent while decoys are off.",
		func(e *exposition, s *Sample) { counts(e, "state", s.Guard.Decoys) }},
	{"shunt_guard_enforced", Gauge, nil, "1 if the kernel enforces a policy of protection, else 0.",
		func(e *exposition, s *Sample) { e.whole("", flag(s.Guard.Enforced)) }},
	{"shunt_guard_operations_total", Counter, []string{"verdict"}, "Operations that rules forbid to the program that tried them, since protection began: denied, or audited.",
		func(e *exposition, s *Sample) {
			e.whole(labels("verdict", "denied"), s.Guard.Denied)
			e.whole(labels("verdict", "audited"), s.Guard.Audited)
		}},
	{"shunt_guard_operations_unheard_total", Counter, nil, "Operations of shunt_guard_operations_total that were reported to no process.",
		func(e *exposition, s *Sample) { e.whole("", s.Guard.Unheard) }},
	{"shunt_guard_operations_unexamined_total", Counter, nil, "Operations that were not examined, because the kernel did not run a program that already ran on the same CPU (before Linux 6.1.54).",
		func(e *exposition, s *Sample) { e.whole("", s.Guard.Unexamined) }},
	{"shunt_guard_no_room_total", Counter, nil, "Processes and new files for which the tables of protection had no room.",
		func(e *exposition, s *Sample) { e.whole("", s.Guard.NoRoom) }},
	{"shunt_guard_opens_waited_total", Counter, nil, "Opens of protected files that waited for the process, and were answered. This and the other families of opens are absent with BPF LSM, because no open waits then.",
		guardOpens(func(e *exposition, o *GuardOpens) { e.whole("", o.Waited) })},
	{"shunt_guard_opens_answer_seconds_total", Counter, nil, "Time that the answers took, each counted from the moment when the process had read the open. Divide it by shunt_guard_opens_waited_total for the mean.",
		guardOpens(func(e *exposition, o *GuardOpens) { e.number("", o.Took) })},
	{"shunt_guard_opens_forbidden_total", Counter, []string{"verdict"}, "Opens that rules forbid to the program that tried them: denied, or audited.",
		guardOpens(func(e *exposition, o *GuardOpens) {
			e.whole(labels("verdict", "denied"), o.Denied)
			e.whole(labels("verdict", "audited"), o.Audited)
		})},
	{"shunt_guard_opens_late_total", Counter, nil, "Opens that were allowed without a judgement, because the answer took more than 5 seconds.",
		guardOpens(func(e *exposition, o *GuardOpens) { e.whole("", o.Late) })},
	{"shunt_guard_opens_unsure_total", Counter, nil, "Opens for which it was unknown whether the program reads or writes (io_uring, openat2, 32-bit programs): each was refused if the rules forbid either.",
		guardOpens(func(e *exposition, o *GuardOpens) { e.whole("", o.Unsure) })},
	{"shunt_guard_opens_files", Gauge, nil, "Files and folders whose opens wait for the process.",
		guardOpens(func(e *exposition, o *GuardOpens) { e.whole("", o.Files) })},
	{"shunt_guard_opens_unread_total", Counter, nil, "New names in protected folders that the process could not read, or for which it had no room: opens of these files do not wait.",
		guardOpens(func(e *exposition, o *GuardOpens) { e.whole("", o.Unread) })},
	{"shunt_guard_connections_total", Counter, []string{"verdict"}, "Operations of connections that rules forbid to the program that tried them: denied, or audited. Absent while no rule of connections is in force.",
		func(e *exposition, s *Sample) { counts(e, "verdict", s.Guard.Connections) }},
	{"shunt_guard_cpu_limit_ratio", Gauge, nil, "The share of one CPU that the process may use (--max-cpu). Absent without a limit.",
		func(e *exposition, s *Sample) {
			if s.Guard.MaxCPU > 0 {
				e.number("", s.Guard.MaxCPU)
			}
		}},
	{"shunt_guard_cpu_throttled_periods_total", Counter, nil, "Periods of 100 ms in which the limit of CPU delayed the process. Absent without a limit.",
		func(e *exposition, s *Sample) {
			if s.Guard.MaxCPU > 0 {
				e.whole("", s.Guard.Throttled)
			}
		}},
}

// guardFeatures writes a family that has samples for each feature.
func guardFeatures(write func(*exposition, *GuardFeature)) func(*exposition, *Sample) {
	return func(e *exposition, s *Sample) {
		for i := range s.Guard.Features {
			write(e, &s.Guard.Features[i])
		}
	}
}

// guardOpens writes a family that exists only if opens wait.
func guardOpens(write func(*exposition, *GuardOpens)) func(*exposition, *Sample) {
	return func(e *exposition, s *Sample) {
		if s.Guard.Opens != nil {
			write(e, s.Guard.Opens)
		}
	}
}

// guardThinned writes a family that has a sample for each type of events of which some are left out.
func guardThinned(write func(*exposition, *GuardThinned)) func(*exposition, *Sample) {
	return func(e *exposition, s *Sample) {
		for i := range s.Guard.Thinned {
			write(e, &s.Guard.Thinned[i])
		}
	}
}

// guardLines writes a family that has a sample for each class of lines.
func guardLines(write func(*exposition, *GuardLines)) func(*exposition, *Sample) {
	return func(e *exposition, s *Sample) {
		for i := range s.Guard.Lines {
			write(e, &s.Guard.Lines[i])
		}
	}
}
