package decoy

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// The kinds of decoys: kinds of files that encryptors look for.
const (
	docx = "docx"
	xlsx = "xlsx"
	pdf  = "pdf"
	jpg  = "jpg"
	sql  = "sql"
)

// magic has the first bytes of a file of each kind.
var magic = map[string][]byte{docx: []byte("PK\x03\x04"), xlsx: []byte("PK\x03\x04"), pdf: []byte("%PDF-"), jpg: {0xff, 0xd8, 0xff}, sql: []byte("-- ")}

// largestBytes is the size of the largest decoys. All but the first few kilobytes are a hole: it takes no room on the
// disk, but a backup that does not know holes copies all of it.
const largestBytes = 1 << 20

// slot is a position among the decoys of a folder. Decoys come in pairs that are neighbours in an order, because a program is held at
// the second one while its effect on the first one is judged.
type slot struct {
	prefix string // the beginning of its name, by which it sorts
	kinds  [2]string
	mtime  func(*rand.Rand) time.Time
	holed  bool
}

// slots has a folder's pairs. '!' is the first character that names begin with, by bytes; locales ignore it, and sort by the zeros.
// U+9FA5 is the last of the common Chinese characters: only Hangul, private and full-width characters and emoji follow. In
// locales that sort Chinese characters before Latin ones, z is last. Compared with sort(1) of glibc 2.36 in C, en_US, de_DE and zh_CN.
var slots = []slot{
	{prefix: "!00", kinds: [2]string{jpg, jpg}, mtime: between(2014, 2018), holed: true}, // first by name, largest
	{prefix: "\u9fa5", kinds: [2]string{docx, xlsx}, mtime: between(2036, 2037)},         // last by name, newest
	{prefix: "zzz", kinds: [2]string{sql, sql}, mtime: between(1990, 1991)},              // last by name, smallest, oldest
	{prefix: ".", kinds: [2]string{pdf, docx}, mtime: between(2014, 2018)},               // hidden
}

// perFolder is the number of decoys in a folder.
var perFolder = 2 * len(slots)

func between(from, to int) func(*rand.Rand) time.Time {
	return func(r *rand.Rand) time.Time {
		begin := time.Date(from, 1, 2, 0, 0, 0, 0, time.UTC)
		return begin.Add(time.Duration(r.Int64N(int64(time.Date(to, 1, 2, 0, 0, 0, 0, time.UTC).Sub(begin))))).Truncate(time.Second)
	}
}

var subjects = []string{"accounts", "archive", "budget", "contracts", "customers", "invoices", "letters", "orders", "payroll", "photos", "projects", "reports", "scans", "statements", "taxes"}

// planned returns the decoys of a folder, without the folder in Path. taken reports whether another file has a name.
func planned(folder string, seed uint64, taken func(name string) bool) (all []Decoy, err error) {
	r := rand.New(rand.NewPCG(seed, 1))
	own := map[string]bool{}
	for _, s := range slots {
		at := s.mtime(r)
		for i, kind := range s.kinds {
			name := ""
			for try := 0; name == "" || taken(name) || own[name]; try++ {
				if try == triesMax {
					return nil, fmt.Errorf("all names that begin with %q are taken", s.prefix)
				}
				name = fmt.Sprintf("%s%d %s %d.%s", s.prefix, i, subjects[r.IntN(len(subjects))], 2008+r.IntN(12), kind)
			}
			own[name] = true
			d := Decoy{Path: join(folder, name), Temp: fmt.Sprintf(".shunt-decoy-%016x", r.Uint64()), Kind: kind, Seed: r.Uint64(), MTime: at.Add(time.Duration(i) * time.Minute)}
			if s.holed {
				d.Size = largestBytes + int64(i)*4096
			}
			if err := d.fill(); err != nil {
				return nil, err
			}
			all = append(all, d)
		}
	}
	return all, nil
}

// triesMax limits the search for a free name.
const triesMax = 1000

// fill computes the size and the digest.
func (d *Decoy) fill() error {
	head, err := d.head()
	if err != nil {
		return err
	}
	d.Size = max(d.Size, int64(len(head)))
	sum := sha256.New()
	sum.Write(head)
	zeros := make([]byte, 1<<16)
	for left := d.Size - int64(len(head)); left > 0; left -= int64(len(zeros)) {
		sum.Write(zeros[:min(left, int64(len(zeros)))])
	}
	d.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// head returns the decoy's contents; a hole follows, up to Size.
func (d *Decoy) head() ([]byte, error) {
	r := rand.New(rand.NewPCG(d.Seed, 2))
	switch d.Kind {
	case docx:
		return office(r, "word/document.xml", "wordprocessingml.document.main", `<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>`,
			func(line string) string { return "<w:p><w:r><w:t>" + line + "</w:t></w:r></w:p>" }, "</w:body></w:document>")
	case xlsx:
		return office(r, "xl/workbook.xml", "spreadsheetml.sheet.main", `<workbook xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheets>`,
			func(line string) string { return `<sheet name="` + line[:8] + `"/>` }, "</sheets></workbook>")
	case jpg:
		return photo(r), nil
	case pdf:
		return page(r), nil
	case sql:
		return fmt.Appendf(nil, "-- %d\nINSERT INTO t VALUES(%d);\n", r.IntN(1000), r.IntN(10000)), nil
	}
	return nil, fmt.Errorf("the journal has a decoy of the kind %q, which this version of shunt does not know", d.Kind)
}

// lines returns words, as in a text.
func lines(r *rand.Rand, count int) (all []string) {
	for range count {
		var words []string
		for range 10 {
			words = append(words, subjects[r.IntN(len(subjects))])
		}
		all = append(all, fmt.Sprintf("%s %d", strings.Join(words, " "), r.IntN(1e6)))
	}
	return all
}

// office returns a package of OOXML (ECMA-376, part 2).
func office(r *rand.Rand, part, contentType, begin string, line func(string) string, end string) ([]byte, error) {
	const head = `<?xml version="1.0" encoding="UTF-8" standalone="yes"?>` + "\n"
	var text strings.Builder
	for _, l := range lines(r, 60) {
		text.WriteString(line(l))
	}
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, f := range []struct{ name, text string }{
		{"[Content_Types].xml", `<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Override PartName="/` + part +
			`" ContentType="application/vnd.openxmlformats-officedocument.` + contentType + `+xml"/></Types>`},
		{"_rels/.rels", `<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="rId1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" Target="` + part + `"/></Relationships>`},
		{part, begin + text.String() + end},
	} {
		one, err := w.Create(f.name)
		if err != nil {
			return nil, err
		}
		if _, err := one.Write([]byte(head + f.text)); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return b.Bytes(), err
}

// picture is a JPEG of noise, 48 by 48.
//
//go:embed photo.jpg
var picture []byte

// photo returns the picture with a comment (ITU-T T.81, B.2.4.5), so that no two are equal.
func photo(r *rand.Rand) []byte {
	const begin, comment, lengthBytes = 2, "\xff\xfe", 2
	text := strings.Join(lines(r, 5), "\n")
	b := append([]byte{}, picture[:begin]...)
	b = binary.BigEndian.AppendUint16(append(b, comment...), uint16(len(text)+lengthBytes))
	return append(append(b, text...), picture[begin:]...)
}

// page returns a document of PDF 1.4 with one page.
func page(r *rand.Rand) []byte {
	var text strings.Builder
	text.WriteString("BT /F1 10 Tf 40 800 Td 12 TL\n")
	for _, l := range lines(r, 20) {
		fmt.Fprintf(&text, "(%s) Tj T*\n", l)
	}
	text.WriteString("ET\n")
	objects := []string{
		"<</Type/Catalog/Pages 2 0 R>>",
		"<</Type/Pages/Kids[3 0 R]/Count 1>>",
		"<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
		fmt.Sprintf("<</Length %d>>\nstream\n%sendstream", text.Len(), text.String()),
		"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
	}
	var b bytes.Buffer
	b.WriteString("%PDF-1.4\n")
	var offsets []int
	for i, o := range objects {
		offsets = append(offsets, b.Len())
		fmt.Fprintf(&b, "%d 0 obj\n%s\nendobj\n", i+1, o)
	}
	xref := b.Len()
	fmt.Fprintf(&b, "xref\n0 %d\n0000000000 65535 f \n", len(objects)+1)
	for _, at := range offsets {
		fmt.Fprintf(&b, "%010d 00000 n \n", at)
	}
	fmt.Fprintf(&b, "trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n", len(objects)+1, xref)
	return b.Bytes()
}
