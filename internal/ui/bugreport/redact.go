package bugreport

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/user"
	"regexp"
	"slices"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/redact"
)

// Redactor replaces addresses, names of hosts, nodes, users and requests, and key material. Equal
// text gets an equal replacement, so that a report can be followed; which is which is not in it.
type Redactor struct {
	aliases map[string]string // by original
	counts  map[string]int    // by kind
	names   []string          // originals to replace wherever they are, longest first
}

const minName = 3 // shorter names are words of other text

// Key files and certificates are not read; they could be in a log. A base64 line this long is
// nothing else that kvspray writes, and may be the secret of an access key, which has 40 bytes.
var (
	longText = regexp.MustCompile(`\b[A-Za-z0-9+/_-]{40,}={0,2}`)
	// The candidates of addresses; netip decides.
	address = regexp.MustCompile(`[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:%[a-z0-9]+)?|` +
		`\d{1,3}(?:\.\d{1,3}){3}`)
	request = regexp.MustCompile(`("(?:req|request|request_id)":\s*"|\breq(?:uest)?=)("?)([^"\s]+)`)
	hex64   = regexp.MustCompile(`^[0-9a-f]+$`)
)

// NewRedactor replaces the names of this host, its user, its node and its bucket.
func NewRedactor(c *config.Config) *Redactor {
	r := &Redactor{aliases: map[string]string{}, counts: map[string]int{}}
	if h, err := os.Hostname(); err == nil {
		r.name("host", h)
	}
	if u, err := user.Current(); err == nil && u.Username != "root" {
		r.name("user", u.Username)
	}
	r.name("node", c.Node)
	r.name("bucket", c.Store.Object.Bucket)
	return r
}

// learn takes the names of nodes from a JSON answer.
func (r *Redactor) learn(answer []byte) {
	var v any
	if json.Unmarshal(answer, &v) == nil {
		r.walk(v)
	}
}

func (r *Redactor) walk(v any) {
	switch v := v.(type) {
	case map[string]any:
		for k, inner := range v {
			if s, ok := inner.(string); ok && k == "node" {
				r.name("node", s)
			}
			r.walk(inner)
		}
	case []any:
		for _, inner := range v {
			r.walk(inner)
		}
	}
}

func (r *Redactor) name(kind, name string) {
	if _, there := r.aliases[name]; there || len(name) < minName || name == "localhost" {
		return
	}
	r.alias(kind, name)
	r.names = append(r.names, name)
	slices.SortFunc(r.names, func(a, b string) int { return len(b) - len(a) })
}

func (r *Redactor) alias(kind, original string) string {
	if a, ok := r.aliases[original]; ok {
		return a
	}
	r.counts[kind]++
	a := fmt.Sprintf("%s-%d", kind, r.counts[kind])
	r.aliases[original] = a
	return a
}

// Redact returns a text with the replacements.
func (r *Redactor) Redact(b []byte) []byte {
	b = redact.Text(b)
	b = request.ReplaceAllFunc(b, func(m []byte) []byte {
		p := request.FindSubmatch(m)
		return slices.Concat(p[1], p[2], []byte(r.alias("request", string(p[3]))))
	})
	b = longText.ReplaceAllFunc(b, func(m []byte) []byte {
		if hex64.Match(m) {
			return m // digests of layouts and weights
		}
		return []byte("[long text]")
	})
	b = address.ReplaceAllFunc(b, func(m []byte) []byte {
		a, err := netip.ParseAddr(string(m))
		if err != nil || a.IsLoopback() || a.IsUnspecified() {
			return m
		}
		return []byte(r.alias("address", a.String()))
	})
	for _, name := range r.names {
		b = replaceWord(b, name, r.aliases[name])
	}
	return b
}

// replaceWord replaces name where no letter or digit is beside it.
func replaceWord(b []byte, name, with string) []byte {
	word := func(c byte) bool {
		return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
	}
	var out bytes.Buffer
	for {
		i := bytes.Index(b, []byte(name))
		if i < 0 {
			break
		}
		after := i + len(name)
		inside := i > 0 && word(b[i-1]) || after < len(b) && word(b[after])
		out.Write(b[:i])
		if inside {
			out.WriteString(name)
		} else {
			out.WriteString(with)
		}
		b = b[after:]
	}
	out.Write(b)
	return out.Bytes()
}
