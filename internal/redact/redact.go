// Package redact keeps secrets out of logs, errors, pages and reports. A Secret prints as its
// length; URL and URLs remove users, passwords and secrets in queries; Text is for texts of others.
// No goroutines.
package redact

import (
	"fmt"
	"log/slog"
	"regexp"
	"strings"
)

// Hidden replaces what is removed.
const Hidden = "..."

// Secret is a password, a token or a key. Every way to print or encode it gives its length, and
// reflection finds an address only: package fmt calls no method of a field that is not exported.
type Secret struct{ text *string }

// NewSecret keeps a text.
func NewSecret(text string) Secret { return Secret{&text} }

// Reveal returns the text, for its user.
func (s Secret) Reveal() string {
	if s.text == nil {
		return ""
	}
	return *s.text
}

// Hide removes the secret from a text, for instance from the error of a service that repeats the
// command that it got.
func (s Secret) Hide(text string) string {
	if s.Reveal() == "" {
		return text
	}
	return strings.ReplaceAll(text, s.Reveal(), Hidden)
}

// String implements fmt.Stringer.
func (s Secret) String() string { return fmt.Sprintf("(%d bytes)", len(s.Reveal())) }

// Format implements fmt.Formatter, for all verbs.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = fmt.Fprint(f, s.String()) }

// MarshalText implements encoding.TextMarshaler, for JSON and YAML.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LogValue implements slog.LogValuer.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

var named = regexp.MustCompile(`(?i)secret|token|pass|auth|cred|key`)

// Names reports whether a name announces a secret.
func Names(name string) bool { return named.MatchString(name) }

// What a text can contain of secrets, with the parts that stay.
var (
	pemBlock   = regexp.MustCompile(`(?s)-----BEGIN [A-Z ]+-----.*?-----END [A-Z ]+-----`)
	assignment = regexp.MustCompile(`(?i)((?:secret|token|passw|passphrase|authorization|credential|` +
		`api[_-]?key|access[_-]?key|private[_-]?key)[a-z_-]*"?\s*[:=]\s*"?` +
		`(?:(?:bearer|basic)\s+)?)[^\s",}]+`)
	accessKey = regexp.MustCompile(`\b(?:AKIA|ASIA)[A-Z0-9]{16}\b`)
)

// Text is a text that others wrote, without the secrets that it announces, without keys in PEM form
// and without users and secret parameters of URLs.
func Text(b []byte) []byte {
	b = pemBlock.ReplaceAll(b, []byte("[key or certificate]"))
	b = assignment.ReplaceAll(b, []byte("${1}[secret]"))
	b = accessKey.ReplaceAll(b, []byte("[access key]"))
	return []byte(URLs(string(b)))
}

// userOf is the user of a URL in a text. A password may contain any character but a space or a
// quotation mark, as the URL may be malformed.
var userOf = regexp.MustCompile(`://[^\s"]*@`)

// secretIn is a parameter of a query whose name announces a secret, or hides what it announces.
var secretIn = regexp.MustCompile(`(?i)([?&;#][^\s"&;=#]*` +
	`(?:secret|token|pass|pwd|auth|cred|key|sig|code|jwt|bearer|session|%)[^\s"&;=#]*=)` +
	`[^\s"&#]*[^\s"&#:]`)

// URLs is a text without the users, passwords and secret parameters of URLs in it. If a URL has
// another @, the text before that is removed, too.
func URLs(text string) string {
	text = userOf.ReplaceAllLiteralString(text, "://"+Hidden+"@")
	return secretIn.ReplaceAllString(text, "${1}"+Hidden)
}

// Parts of a text that is to be a URL or an address.
var (
	schemeOf = regexp.MustCompile(`^(?:[A-Za-z][A-Za-z0-9+.-]*)?:?//`)
	hostPort = regexp.MustCompile(`^(?:\[[^\]]*\]|[^:/?#]*)(?::[0-9]*)?(?:[/?#]|$)`)
)

// URL is a text that is to be one URL or address, without its user, password, query and fragment.
// It may be malformed, and have no scheme. All of it is hidden, but for a scheme, if a password may
// be anywhere: before or behind an @ that is not the first delimiter or follows no scheme, or in
// place of a port.
func URL(text string) string {
	scheme := schemeOf.FindString(text)
	rest, shown := text[len(scheme):], scheme
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		if scheme == "" || strings.ContainsAny(rest[:at], "/?#") {
			return scheme + Hidden
		}
		rest, shown = rest[at+1:], scheme+Hidden+"@"
	}
	if !hostPort.MatchString(rest) {
		return scheme + Hidden
	}
	if i := strings.IndexAny(rest, "?#"); i >= 0 {
		rest = rest[:i+1] + Hidden
	}
	return shown + rest
}
