package main

import (
	"fmt"
	"go/constant"
	"go/token"
	"go/types"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// schema is what messages.schema declares, in its order.
type schema struct {
	consts   []*constDecl
	features []option
	lists    []*optionList // words and enums
	bodies   []*body
}

type constDecl struct {
	name, expr, doc string
	value           int64
}

// option is one name of a list, with its number.
type option struct {
	name, doc string
	value     int64
}

type optionList struct {
	name, doc string
	words     bool // strings on the wire, and numbers in C
	closed    bool // no other string is accepted
	options   []option
}

// body is a set of fields: a packet, a record, or a part of one.
type body struct {
	kind    string // "packet", "record", "struct", "tuple", "packed"
	number  int64  // of a packet or record
	wire    string // its name in documents
	name    string // its name in Go
	from    []string
	needs   string
	checked bool
	doc     string
	fields  []*field
}

type field struct {
	key, doc string
	typ      *fieldType
	required bool
	omit     bool
	cutAll   bool   // overflow=empty
	def      string // default
	min, max string
	floor    string
}

type fieldType struct {
	kind  string
	bound string // as it is written
	elem  *fieldType
	body  *body
	words *optionList
}

// parser reads a schema line by line.
type parser struct {
	s     *schema
	names map[string]any // *constDecl, *optionList, *body
	body  *body
	list  *optionList
}

func parse(path string) (*schema, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	p := &parser{s: &schema{}, names: map[string]any{}}
	for i, line := range strings.Split(string(raw), "\n") {
		if strings.HasPrefix(line, "#") {
			continue
		}
		text, doc, _ := strings.Cut(line, "--")
		words := strings.Fields(text)
		if len(words) == 0 {
			continue
		}
		if err := p.line(strings.HasPrefix(line, " "), words, strings.TrimSpace(doc)); err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, i+1, err)
		}
	}
	return p.s, nil
}

func (p *parser) line(inner bool, words []string, doc string) error {
	switch {
	case inner && p.body != nil:
		return p.field(words, doc)
	case inner && p.list != nil:
		return p.option(words, doc)
	case inner:
		return fmt.Errorf("%q belongs to no declaration", words[0])
	}
	p.body, p.list = nil, nil
	if len(words) < 2 {
		return fmt.Errorf("%q has no name", words[0])
	}
	switch words[0] {
	case "const":
		return p.constant(words, doc)
	case "feature":
		p.s.features = append(p.s.features, option{name: words[1], doc: doc,
			value: 1 << len(p.s.features)})
		return nil
	case "words", "enum":
		p.list = &optionList{name: words[1], doc: doc, words: words[0] == "words",
			closed: slices.Contains(words[2:], "closed")}
		p.s.lists = append(p.s.lists, p.list)
		return p.declare(words[1], p.list)
	case "struct", "tuple", "packed", "packet", "record":
		return p.declaration(words, doc)
	}
	return fmt.Errorf("%q is no declaration", words[0])
}

func (p *parser) declare(name string, what any) error {
	if b, ok := p.names[name].(*body); ok && b.name == "Empty" {
		return nil // several records without fields
	}
	if p.names[name] != nil {
		return fmt.Errorf("%s is declared twice", name)
	}
	p.names[name] = what
	return nil
}

func (p *parser) constant(words []string, doc string) error {
	c := &constDecl{name: words[1], expr: strings.Join(words[2:], " "), doc: doc}
	var err error
	if c.value, err = p.s.eval(c.expr); err != nil {
		return err
	}
	p.s.consts = append(p.s.consts, c)
	return p.declare(c.name, c)
}

// eval computes a bound or default.
func (s *schema) eval(expr string) (int64, error) {
	text := identifiers.ReplaceAllStringFunc(expr, func(name string) string {
		for _, c := range s.consts {
			if c.name == name {
				return fmt.Sprintf("(%d)", c.value)
			}
		}
		for _, l := range s.lists {
			for _, o := range l.options {
				if !l.words && l.name+camel(o.name) == name {
					return fmt.Sprintf("(%d)", o.value)
				}
			}
		}
		return name
	})
	v, err := types.Eval(token.NewFileSet(), nil, token.NoPos, text)
	if err != nil {
		return 0, err
	}
	n, exact := constant.Int64Val(v.Value)
	if !exact {
		return 0, fmt.Errorf("%s is no integer", expr)
	}
	return n, nil
}

var identifiers = regexp.MustCompile(`[A-Za-z]\w*`)

func (p *parser) option(words []string, doc string) error {
	name, number, explicit := strings.Cut(words[0], "=")
	o := option{name: name, doc: doc, value: 1}
	if n := len(p.list.options); n > 0 {
		o.value = p.list.options[n-1].value + 1
	}
	if explicit {
		var err error
		if o.value, err = strconv.ParseInt(number, 0, 64); err != nil {
			return err
		}
	}
	p.list.options = append(p.list.options, o)
	return nil
}

func (p *parser) declaration(words []string, doc string) error {
	b := &body{kind: words[0], name: words[1], doc: doc}
	rest := words[2:]
	if b.kind == "packet" || b.kind == "record" {
		if len(words) < 6 || words[4] != "from" {
			return fmt.Errorf("want %s NUMBER WIRE-NAME NAME from SENDER", b.kind)
		}
		var err error
		if b.number, err = strconv.ParseInt(words[1], 10, 16); err != nil {
			return err
		}
		b.wire, b.name, rest = words[2], words[3], words[5:]
	}
	for _, w := range rest {
		attr, value, _ := strings.Cut(w, "=")
		switch attr {
		case "checked":
			b.checked = true
		case "needs":
			if b.needs = value; !slices.ContainsFunc(p.s.features, func(o option) bool {
				return o.name == value
			}) {
				return fmt.Errorf("%s needs the feature %q, which is not declared", b.name, value)
			}
		case "or":
		case "shim", "engine", "sidecar":
			b.from = append(b.from, attr)
		default:
			return fmt.Errorf("%q is no attribute of a %s", w, b.kind)
		}
	}
	p.body = b
	p.s.bodies = append(p.s.bodies, b)
	return p.declare(b.name, b)
}

func (p *parser) field(words []string, doc string) error {
	if len(words) < 2 {
		return fmt.Errorf("%s has no type", words[0])
	}
	f := &field{key: words[0], doc: doc}
	var err error
	if f.typ, err = p.typ(words[1]); err != nil {
		return fmt.Errorf("%s: %w", f.key, err)
	}
	for _, w := range words[2:] {
		attr, value, _ := strings.Cut(w, "=")
		switch attr {
		case "required":
			f.required = true
		case "omitempty":
			f.omit = true
		case "default":
			f.def = value
		case "min":
			f.min = value
		case "max":
			f.max = value
		case "floor":
			f.floor = value
		case "overflow":
			f.cutAll = true
		default:
			return fmt.Errorf("%s: %q is no attribute of a field", f.key, w)
		}
	}
	for _, bound := range []string{f.def, f.min, f.max, f.floor} {
		if bound == "" {
			continue
		}
		if _, err := p.s.eval(bound); err != nil {
			return fmt.Errorf("%s: %w", f.key, err)
		}
	}
	p.body.fields = append(p.body.fields, f)
	return nil
}

var generic = regexp.MustCompile(`^(str|text|bin|word|list|packed)\((.*)\)$`)

func (p *parser) typ(text string) (*fieldType, error) {
	switch text {
	case "u32", "u64", "bool", "version", "bin16", "bin32", "pair", "features", "map":
		return &fieldType{kind: text}, nil
	}
	m := generic.FindStringSubmatch(text)
	if m == nil {
		b, ok := p.names[text].(*body)
		if !ok {
			return nil, fmt.Errorf("%q is no type", text)
		}
		return &fieldType{kind: b.kind, body: b}, nil
	}
	t := &fieldType{kind: m[1], bound: m[2]}
	switch t.kind {
	case "word":
		l, ok := p.names[m[2]].(*optionList)
		if !ok || !l.words {
			return nil, fmt.Errorf("%q is no list of words", m[2])
		}
		t.words, t.bound = l, "MaxNameBytes"
		return t, nil
	case "list", "packed":
		comma := strings.LastIndex(m[2], ",")
		if comma < 0 {
			return nil, fmt.Errorf("%q has no bound", text)
		}
		var err error
		if t.elem, err = p.typ(m[2][:comma]); err != nil {
			return nil, err
		}
		t.bound = m[2][comma+1:]
	}
	_, err := p.s.eval(t.bound)
	return t, err
}

// camel turns some_name into SomeName, as Go spells it.
func camel(s string) string {
	var b strings.Builder
	for part := range strings.SplitSeq(strings.ToLower(s), "_") {
		switch part {
		case "id", "fd", "ms", "us", "pid", "sq", "cq", "dp", "pp", "tp", "pcp", "dcp":
			b.WriteString(strings.ToUpper(part))
		case "fds":
			b.WriteString("FDs")
		case "ttl":
			b.WriteString("TTL")
		case "dtype":
			b.WriteString("DType")
		case "":
		default:
			b.WriteString(strings.ToUpper(part[:1]) + part[1:])
		}
	}
	return b.String()
}

// packedBytes is the size of an element of a packed list.
func (t *fieldType) packedBytes() int {
	switch {
	case t.kind == "u32":
		return 4
	case t.kind == "u64":
		return 8
	}
	n := 0
	for _, f := range t.body.fields {
		n += f.typ.packedBytes()
	}
	return n
}

// minBytes is the size of the shortest encoding.
func (t *fieldType) minBytes() int {
	switch t.kind {
	case "bin16":
		return 18
	case "bin32":
		return 34
	case "bin", "packed":
		return 2
	case "pair":
		return 3
	case "struct", "tuple":
		n := 1
		for _, f := range t.body.fields {
			if t.kind == "tuple" {
				n += f.typ.minBytes()
			} else if f.required {
				n += 1 + len(f.key) + f.typ.minBytes()
			}
		}
		return n
	}
	return 1
}
