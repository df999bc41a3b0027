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
	if m.FD == NoFD && m.Kind != KindDevice {
		return "fd", "missing"
	}
	return "", ""
}

// Work memory and the eventfd that wakes the shim for it come together. Index 0 is another's.
func (m *FDs) check() (field, problem string) {
	switch {
	case m.WorkBell == 0 && m.Work != 0:
		return "work_bell", "missing"
	case m.Work == 0 && m.WorkBell != 0:
		return "work", "missing"
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

func (m *Received) check() (field, problem string) {
	for _, v := range m.Recompute {
		if v[0] >= v[1] {
			return "recompute", fmt.Sprintf("range [%d, %d)", v[0], v[1])
		}
	}
	return "", ""
}

func (m *Get) check() (field, problem string) { return onePerKey(len(m.Keys), len(m.Slots)) }

func (m *Put) check() (field, problem string) {
	if n := len(m.Parent); n != 0 && n != 32 {
		return "parent", fmt.Sprintf("bin of %d bytes, want 32", n)
	}
	return onePerKey(len(m.Keys), len(m.Slots))
}

func onePerKey(keys, slots int) (field, problem string) {
	if slots != keys {
		return "slots", fmt.Sprintf("%d, but there are %d keys", slots, keys)
	}
	return "", ""
}
