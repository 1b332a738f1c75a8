package cluster

import (
	"testing"
)

func TestReadReport(t *testing.T) {
	specs := must(readReport([]byte(`<testsuites><testsuite name="x">
<testcase name="[SynchronizedBeforeSuite]" status="passed" time="1"></testcase>
<testcase name="[It] [sig-network] Services should be one [Conformance] [sig-network, Conformance]" status="failed" time="2.5"><failure message="no answer"></failure></testcase>
</testsuite></testsuites>`)))(t)
	if len(specs) != 1 {
		t.Fatalf("%+v", specs)
	}
	s := specs[0]
	if s.Name != "[sig-network] Services should be one [Conformance]" || s.Status != "failed" || s.Seconds != 2.5 || s.Failure.Message != "no answer" {
		t.Errorf("%+v", s)
	}
	if _, err := readReport([]byte("<testsuites>")); err == nil {
		t.Error("half a report is read")
	}
}
