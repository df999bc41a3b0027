package msg

import "fmt"

// What the schema cannot express: each check returns the field and its problem, or nothing.

func (m *Rank) check() (field, problem string) {
	if m.Rank >= m.Size {
		return "", fmt.Sprintf("rank %d of %d", m.Rank, m.Size)
	}
	return "", ""
}

func (m *Region) check() (field, problem string) {
	switch {
	case m.FD == NoFD && m.Kind != KindDevice:
		return "fd", "missing"
	case m.Offset != 0 && m.Kind != KindMemfd:
		return "offset", fmt.Sprintf("%d, but a region of kind %q has none", m.Offset, m.Kind)
	}
	return "", ""
}

func (m *Intent) check() (field, problem string) {
	if m.Ready > m.Tokens {
		return "ready", fmt.Sprintf("%d of %d tokens", m.Ready, m.Tokens)
	}
	last := PendingStep{}
	for _, s := range m.Steps {
		if s.Step <= last.Step || s.End < last.End {
			return "steps", fmt.Sprintf("step %d to token %d is not after the one before", s.Step, s.End)
		}
		last = s
	}
	return "", ""
}

func (m *Expect) check() (field, problem string) {
	if len(m.Skip) > 0 && len(m.Skip) != len(m.Blocks) {
		return "skip", fmt.Sprintf("%d groups, but blocks has %d", len(m.Skip), len(m.Blocks))
	}
	for i, s := range m.Skip {
		if s > m.Tokens {
			return "skip", fmt.Sprintf("group %d: %d of %d tokens", i, s, m.Tokens)
		}
	}
	return "", ""
}

func (m *Decline) check() (field, problem string) {
	if len(m.Ranks) > 0 && m.Req == "" {
		return "req", "missing, but ranks names some of its request's"
	}
	return "", ""
}

func (m *Received) check() (field, problem string) {
	for _, v := range m.Recompute {
		if v[0] >= v[1] {
			return "recompute", fmt.Sprintf("range [%d, %d)", v[0], v[1])
		}
	}
	return "", ""
}

// Blocks and their pieces come together.
func (m *Open) check() (field, problem string) {
	switch {
	case m.Blocks == 0 && len(m.Pieces) > 0:
		return "blocks", "0, but there are pieces"
	case m.Blocks > 0 && len(m.Pieces) == 0:
		return "pieces", "missing, but there are blocks"
	}
	return "", ""
}

func (m *Exists) check() (field, problem string) {
	_, field, problem = wholeHashes(m.Hashes, m.HashBytes)
	return field, problem
}

func (m *Get) check() (field, problem string) {
	return onePerHash(m.Hashes, m.HashBytes, len(m.Blocks))
}

func (m *Put) check() (field, problem string) {
	if n := len(m.Parent); n != 0 && n != int(m.HashBytes) {
		return "parent", fmt.Sprintf("hash of %d bytes, the others have %d", n, m.HashBytes)
	}
	return onePerHash(m.Hashes, m.HashBytes, len(m.Blocks))
}

func wholeHashes(hashes []byte, each uint32) (n int, field, problem string) {
	n = len(hashes) / int(each)
	switch {
	case len(hashes) == 0 || len(hashes)%int(each) != 0:
		problem = fmt.Sprintf("%d bytes are no whole number of hashes of %d", len(hashes), each)
	case n > MaxKeys:
		problem = fmt.Sprintf("%d, at most %d", n, MaxKeys)
	default:
		return n, "", ""
	}
	return n, "hashes", problem
}

func onePerHash(hashes []byte, each uint32, blocks int) (field, problem string) {
	n, field, problem := wholeHashes(hashes, each)
	if problem == "" && blocks != n {
		return "blocks", fmt.Sprintf("%d, but there are %d hashes", blocks, n)
	}
	return field, problem
}

func (m *Segment) check() (field, problem string) {
	switch {
	case m.Name == "":
		return "name", "empty"
	case m.Path == "" && m.Bytes == 0:
		return "bytes", "0"
	case m.Path != "" && m.Region != 0:
		return "path", "a segment is a region or a file, and this names both"
	}
	for i, g := range m.Grants {
		if !g.Read && !g.Write || g.To == "" {
			return fmt.Sprintf("grants[%d]", i), fmt.Sprintf("to %q, read %v, write %v: names no right",
				g.To, g.Read, g.Write)
		}
	}
	return "", ""
}

func (m *Batch) check() (field, problem string) {
	if m.Segment == "" {
		return "segment", "empty"
	}
	if m.Durable && !m.Write {
		return "durable", "set, and the batch reads"
	}
	return "", ""
}
