package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"sort"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/kvspray/kvspray/internal/redact"
)

// maxFileBytes bounds a configuration file; a real one has a few kilobytes.
const maxFileBytes = 1 << 20

// maxErrors bounds the errors of one Load.
const maxErrors = 20

// Error is one error in a configuration: its position, the value, and the remedy.
type Error struct {
	File   string // empty: a flag
	Line   int    // 0: unknown
	Key    string // dotted: transports.tcp.rails[0].listen
	Value  string
	Wrong  string
	Remedy string
}

func (e *Error) Error() string {
	var b strings.Builder
	if e.File != "" {
		b.WriteString(e.File)
		if e.Line > 0 {
			fmt.Fprintf(&b, ":%d", e.Line)
		}
		b.WriteString(": ")
	}
	b.WriteString(redact.URLs(e.Key))
	if e.Value != "" {
		fmt.Fprintf(&b, ": %s", strconv.Quote(shorten(redact.URLs(e.Value))))
	}
	fmt.Fprintf(&b, ": %s", e.Wrong)
	if e.Remedy != "" {
		fmt.Fprintf(&b, "; %s", e.Remedy)
	}
	return b.String()
}

func shorten(s string) string {
	const maxShown = 120 // bytes of a value that an error repeats
	if len(s) <= maxShown {
		return s
	}
	return s[:maxShown] + "..."
}

// origin reads a configuration, and records the positions of its values, so that Validate can name
// the line.
type origin struct {
	file  string
	lines map[string]int
	flags map[string]bool
}

// Load reads a file (none if path is empty), applies "key=value" settings over it, and validates
// the result.
func Load(path string, sets ...string) (*Config, error) {
	c := Default()
	if err := c.origin.load(c, path, sets); err != nil {
		return nil, err
	}
	return c, c.Validate()
}

// load applies a file and settings to a configuration.
func (o *origin) load(into any, path string, sets []string) error {
	if path != "" {
		data, err := readBounded(path)
		if err != nil {
			return fmt.Errorf("config: %w; give --config the path of a readable YAML file", err)
		}
		if err := o.parse(into, path, data); err != nil {
			return err
		}
	}
	for _, s := range sets {
		if err := o.set(into, s); err != nil {
			return err
		}
	}
	return nil
}

// Parse is Load for bytes; name replaces the file name in errors.
func Parse(name string, data []byte) (*Config, error) {
	c := Default()
	if err := c.origin.parse(c, name, data); err != nil {
		return nil, err
	}
	return c, c.Validate()
}

func readBounded(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // read only
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(data) > maxFileBytes {
		err = fmt.Errorf("%s is larger than %d bytes", path, maxFileBytes)
	}
	return data, err
}

func (o *origin) parse(into any, name string, data []byte) error {
	o.file = name
	if len(data) > maxFileBytes {
		return &Error{File: name, Key: "file", Wrong: fmt.Sprintf("larger than %d bytes", maxFileBytes)}
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return nil // an empty file sets nothing
		}
		line := yamlLine(err)
		return &Error{File: name, Line: line, Key: "syntax", Wrong: strings.TrimPrefix(err.Error(),
			"yaml: ") + excerpt(data, line),
			Remedy: "compare with 'kvspray config print'"}
	}
	var more yaml.Node
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return &Error{File: name, Line: more.Line, Key: "document", Wrong: "a second YAML document",
			Remedy: "keep one and remove the '---'"}
	}
	if len(doc.Content) == 0 {
		return nil
	}
	w := walker{file: name, lines: map[string]int{}}
	w.value(doc.Content[0], reflect.ValueOf(into).Elem(), "", tags{})
	o.lines = w.lines
	return w.err()
}

// yamlLine extracts the line from the library's message, which has no field for it.
func yamlLine(err error) int {
	_, rest, ok := strings.Cut(err.Error(), "line ")
	if !ok {
		return 0
	}
	digits, _, _ := strings.Cut(rest, ":")
	n, convErr := strconv.Atoi(digits)
	if convErr != nil {
		return 0
	}
	return n
}

// maxExcerptBytes bounds the part of a line in an error.
const maxExcerptBytes = 80

// excerpt quotes invalid YAML, its key and value. The parser names the wrong line or the one before
// it, so both are shown.
func excerpt(data []byte, line int) string {
	lines := bytes.Split(data, []byte("\n"))
	if line < 1 || line > len(lines) {
		return ""
	}
	shown := func(line []byte) []byte { return bytes.TrimSpace(redact.Text(line)) }
	near := fmt.Sprintf(", near %.*q", maxExcerptBytes, shown(lines[line-1]))
	if line < len(lines) && len(bytes.TrimSpace(lines[line])) > 0 {
		near += fmt.Sprintf(" and %.*q", maxExcerptBytes, shown(lines[line]))
	}
	return near
}

// Set applies one "key=value" of a flag: the dotted key of a scalar or a comma-separated list, or
// "transports.tcp.rails=name@host:port,..." or "store.disk=path=size,...".
func (c *Config) Set(setting string) error { return c.origin.set(c, setting) }

func (o *origin) set(into any, setting string) error {
	key, text, ok := strings.Cut(setting, "=")
	if !ok {
		return &Error{Key: setting, Wrong: "not of the form key=value", Remedy: "write for instance " +
			"transports.tcp.integrity=off"}
	}
	v := reflect.ValueOf(into).Elem()
	var tg tags
	for part := range strings.SplitSeq(key, ".") {
		if v.Kind() != reflect.Struct {
			return &Error{Key: key, Value: text, Wrong: "no such key", Remedy: "'kvspray config print' " +
				"lists them all"}
		}
		i, known := fieldByKey(v.Type(), part)
		if i < 0 {
			return unknownKey(&Error{Key: key, Value: text}, part, known)
		}
		tg = tagsOf(v.Type().Field(i))
		v = v.Field(i)
	}
	w := walker{lines: map[string]int{}}
	node := &yaml.Node{Kind: yaml.ScalarNode, Value: text}
	switch {
	case v.Type() == reflect.TypeFor[[]Rail]() && text == Auto:
		v.Set(reflect.ValueOf(autoRails()))
	case v.Type() == reflect.TypeFor[[]Rail]():
		rails, err := parseRails(text)
		if err != nil {
			return &Error{Key: key, Value: text, Wrong: err.Error(), Remedy: "write name@host:port, " +
				"several separated by commas, or auto"}
		}
		v.Set(reflect.ValueOf(rails))
	case v.Type() == reflect.TypeFor[[]StoreDisk]():
		disks, err := parseDisks(text)
		if err != nil {
			return &Error{Key: key, Value: text, Wrong: err.Error(), Remedy: "write path=size, several " +
				"separated by commas: /nvme0/kv=1TiB"}
		}
		v.Set(reflect.ValueOf(disks))
	case v.Kind() == reflect.Slice:
		list := &yaml.Node{Kind: yaml.SequenceNode}
		for item := range strings.SplitSeq(text, ",") {
			if item != "" {
				list.Content = append(list.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: item})
			}
		}
		w.value(list, v, key, tg)
	case v.Kind() == reflect.Struct:
		return &Error{Key: key, Value: text, Wrong: "names a section", Remedy: "name one of its keys"}
	default:
		w.value(node, v, key, tg)
	}
	o.mark(key)
	return w.err()
}

// mark notes that a flag has set a key.
func (o *origin) mark(key string) {
	if o.flags == nil {
		o.flags = map[string]bool{}
	}
	o.flags[key] = true
}

func parseDisks(text string) ([]StoreDisk, error) {
	var disks []StoreDisk
	for item := range strings.SplitSeq(text, ",") {
		at := strings.LastIndexByte(item, '=')
		if at < 0 {
			return nil, fmt.Errorf("%q has no =", item)
		}
		size, err := parseUnits(item[at+1:], sizeUnits)
		if err != nil {
			return nil, fmt.Errorf("size %q is not %w", item[at+1:], err)
		}
		disks = append(disks, StoreDisk{Path: item[:at], Size: Size(size)})
	}
	return disks, nil
}

func parseRails(text string) ([]Rail, error) {
	var rails []Rail
	for item := range strings.SplitSeq(text, ",") {
		name, addr, ok := strings.Cut(item, "@")
		if !ok {
			return nil, fmt.Errorf("rail %q has no @", item)
		}
		rails = append(rails, Rail{Name: name, Listen: addr})
	}
	return rails, nil
}

// walker applies a YAML tree to a struct. The library's strict mode stops at the first error and
// does not name its section; walker lists all errors.
type walker struct {
	file  string
	lines map[string]int
	errs  []error
}

type tags struct{ unit string }

func tagsOf(f reflect.StructField) tags { return tags{unit: f.Tag.Get("unit")} }

func (w *walker) err() error {
	if len(w.errs) > maxErrors {
		w.errs = append(w.errs[:maxErrors], fmt.Errorf("and more errors after these %d", maxErrors))
	}
	return errors.Join(w.errs...)
}

func (w *walker) fail(n *yaml.Node, key, wrong, remedy string) {
	e := &Error{File: w.file, Line: n.Line, Key: key, Value: written(n), Wrong: wrong, Remedy: remedy}
	if key == "" {
		e.Key = "document"
	}
	w.errs = append(w.errs, e)
}

func (w *walker) value(n *yaml.Node, v reflect.Value, key string, tg tags) {
	w.lines[key] = n.Line
	if n.Kind == yaml.AliasNode {
		w.fail(n, key, "a YAML alias", "write the value itself")
		return
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return // "key:" with nothing after it keeps the default
	}
	switch v.Kind() {
	case reflect.Struct:
		w.mapping(n, v, key)
	case reflect.Slice:
		if v.Type() == reflect.TypeFor[[]Rail]() && n.Kind == yaml.ScalarNode && n.Value == Auto {
			v.Set(reflect.ValueOf(autoRails()))
			return
		}
		if n.Kind != yaml.SequenceNode {
			w.fail(n, key, "not a list", "write [a, b], or one '- item' a line")
			return
		}
		out := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
		for i, item := range n.Content {
			w.value(item, out.Index(i), fmt.Sprintf("%s[%d]", key, i), tg)
		}
		v.Set(out)
	default:
		if n.Kind != yaml.ScalarNode {
			w.fail(n, key, "not a single value", "write one value of the form: "+want(v, tg))
			return
		}
		if err := setScalar(v, n.Value); err != nil {
			w.fail(n, key, "not "+err.Error(), "write "+want(v, tg))
		}
	}
}

func (w *walker) mapping(n *yaml.Node, v reflect.Value, key string) {
	if n.Kind != yaml.MappingNode {
		w.fail(n, key, "not a section", "write 'key: value' lines, indented under it")
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, val := n.Content[i], n.Content[i+1]
		if len(w.errs) > maxErrors {
			return
		}
		path, text := join(key, k.Value), written(val)
		f, known := fieldByKey(v.Type(), k.Value)
		if first, dup := seen[k.Value]; dup {
			if f < 0 {
				text = unrepeated(k.Value, text)
			}
			wrong := "written twice"
			if first > 0 {
				wrong += fmt.Sprintf(", first in line %d", first)
			}
			w.errs = append(w.errs, &Error{File: w.file, Line: k.Line, Key: path, Value: text,
				Wrong: wrong, Remedy: "keep one of them"})
			continue
		}
		seen[k.Value] = k.Line
		if k.Kind != yaml.ScalarNode || f < 0 {
			w.errs = append(w.errs, unknownKey(&Error{File: w.file, Line: k.Line, Key: path,
				Value: text}, k.Value, known))
			continue
		}
		w.value(val, v.Field(f), path, tagsOf(v.Type().Field(f)))
	}
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "." + b
}

// fieldByKey returns the index of the field with that key, or -1, and all keys of the struct.
func fieldByKey(t reflect.Type, key string) (int, []string) {
	known := make([]string, 0, t.NumField())
	found := -1
	for i := range t.NumField() {
		name := t.Field(i).Tag.Get("yaml")
		if name == "" {
			continue
		}
		known = append(known, name)
		if name == key {
			found = i
		}
	}
	return found, known
}

// written is the value of a key, shortened if it is not a scalar.
func written(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "{...}"
	case yaml.SequenceNode:
		return "[...]"
	case yaml.AliasNode:
		return "*" + n.Value
	}
	return n.Value
}

// unrepeated is the value of an unknown key, as errors show it.
func unrepeated(key, value string) string {
	if value != "" && redact.Names(key) {
		return fmt.Sprintf("(%d bytes, not repeated here)", len(value))
	}
	return value
}

// unknownKey completes an error about an unknown key. Known keys name files of secrets and never
// contain secrets. An unknown key that sounds like a secret may contain one: its value is not
// repeated, because logs record errors.
func unknownKey(e *Error, key string, known []string) error {
	e.Wrong, e.Remedy = "unknown key", "known here: "+strings.Join(known, ", ")
	near := Nearest(key, known)
	if near != "" {
		e.Remedy = fmt.Sprintf("did you mean %q? %s", near, e.Remedy)
	}
	e.Value = unrepeated(key, e.Value)
	return e
}

// Nearest returns the known key closest to key, or none: one edit per three letters, two at most.
func Nearest(key string, known []string) string {
	best, dist := "", min(len(key)/3, 2)+1
	if len(key) <= 3 {
		dist = 1 // in a short one any letter makes another word
	}
	sorted := append([]string(nil), known...)
	sort.Strings(sorted)
	for _, k := range sorted {
		if d := edits(key, k, dist); d < dist {
			best, dist = k, d
		}
	}
	return best
}

// edits is the Levenshtein distance, up to limit.
func edits(a, b string, limit int) int {
	if len(a)-len(b) >= limit || len(b)-len(a) >= limit {
		return limit
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diag := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := diag
			if a[i-1] != b[j-1] {
				cost++
			}
			diag = row[j]
			row[j] = min(cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)]
}

func setScalar(v reflect.Value, text string) error {
	switch v.Type() {
	case reflect.TypeFor[Duration]():
		d, err := time.ParseDuration(text)
		if err != nil {
			return errors.New("a duration with its unit")
		}
		v.SetInt(int64(d))
		return nil
	case reflect.TypeFor[Size]():
		n, err := parseUnits(text, sizeUnits)
		v.SetUint(n)
		return err
	case reflect.TypeFor[Portion]():
		p, err := parsePortion(text)
		v.SetString(string(p))
		return err
	case reflect.TypeFor[Rate]():
		n, err := parseUnits(text, rateUnits)
		v.SetUint(n)
		return err
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
	case reflect.Bool:
		if text != "true" && text != "false" {
			return errors.New("true or false")
		}
		v.SetBool(text == "true")
	case reflect.Int:
		n, err := strconv.Atoi(text)
		if err != nil {
			return errors.New("a whole number")
		}
		v.SetInt(int64(n))
	case reflect.Float64:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return errors.New("a number")
		}
		v.SetFloat(f)
	default:
		panic("config: field of kind " + v.Kind().String()) // a test covers every field
	}
	return nil
}

func want(v reflect.Value, tg tags) string {
	switch v.Type() {
	case reflect.TypeFor[Duration]():
		return "a number and ms, s, m or h, for instance 30s"
	case reflect.TypeFor[Size]():
		return "a number and B, KiB, MiB or GiB, for instance 256KiB"
	case reflect.TypeFor[Portion]():
		return "a number and B, KiB, MiB, GiB or %, for instance 32GiB or 50%"
	case reflect.TypeFor[Rate]():
		return "a number and bit, kbit, mbit or gbit, for instance 10gbit"
	}
	if v.Kind() == reflect.Int && tg.unit != "" {
		return "digits alone (" + tg.unit + ")"
	}
	if tg.unit != "" {
		return tg.unit
	}
	if v.Kind() == reflect.Int {
		return "digits alone"
	}
	return "text"
}
