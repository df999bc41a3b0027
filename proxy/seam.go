package proxy

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// stops are the stop strings of a request.
type stops struct {
	list    []string
	include bool // the answer has the one that ends it
}

// held is how many code points engines hold back, as a stop string may begin in them.
func (s *stops) held() int {
	longest := 1
	for _, stop := range s.list {
		longest = max(longest, utf8.RuneCountInString(stop))
	}
	return longest - 1
}

// seam finds stop strings that begin in the text of an engine that has failed, and end in the text
// of the next one: neither engine has both parts. text is the end of the former and all of the
// latter.
type seam struct {
	stops
	text string
	old  int // bytes of text that the former engine computed
	sent int // bytes that the client has
}

// newSeam begins with all text of an answer, of which the client has a part.
func newSeam(s stops, all string, sent int) *seam {
	from, held := len(all), s.held()
	for range held {
		_, n := utf8.DecodeLastRuneInString(all[:from])
		from -= n
	}
	from = min(from, sent)
	// A clone does not keep the rest of the text.
	return &seam{stops: s, text: strings.Clone(all[from:]), old: len(all) - from, sent: sent - from}
}

// match is a stop string in a text.
type match struct {
	at, end int
	stop    int // its number
}

// cross finds the match over the seam that ends first.
func (s *seam) cross(text string) (best match, ok bool) {
	for i, stop := range s.list {
		from := max(0, s.old-len(stop)+1)
		at := strings.Index(text[min(from, len(text)):], stop)
		if at < 0 || stop == "" || from+at >= s.old {
			continue
		}
		if m := (match{from + at, from + at + len(stop), i}); !ok || m.end < best.end {
			best, ok = m, true
		}
	}
	return best, ok
}

// add adds text of the next engine. It returns what the client gets now, and the stop string over
// the seam that ends the answer; empty: none does. own is the stop string that has ended the
// engine's answer; last: nothing follows. over: no stop string can be over the seam any more.
func (s *seam) add(text, own string, last bool) (send, stop string, over bool) {
	s.text += text
	whole := s.text
	if own != "" && !s.include {
		whole += own
	}
	m, found := s.cross(whole)
	if found && (own == "" || m.end < len(whole) ||
		m.end == len(whole) && m.stop < slices.Index(s.list, own)) {
		end := m.at
		if s.include {
			end = m.end
		}
		return whole[min(s.sent, end):end], s.list[m.stop], true
	}
	over = last || utf8.RuneCountInString(s.text[s.old:]) >= s.held()
	if !over && !s.include {
		return "", "", false // it may belong to a stop string that the answer must not have
	}
	send = s.text[s.sent:]
	s.sent = len(s.text)
	return send, "", over
}
