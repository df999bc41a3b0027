// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
)

// Bounds of the interval.
const (
	MinInterval = 100 * time.Millisecond // limits the load on the sidecar
	MaxInterval = time.Minute
)

// Once prints the state one time, without attributes. Rates are those of one interval.
func Once(ctx context.Context, addr string, interval time.Duration, w io.Writer) error {
	prev, err := Fetch(ctx, addr)
	if err != nil {
		return err
	}
	t := time.NewTimer(interval)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	cur, err := Fetch(ctx, addr)
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, Render(prev, cur, 0, Plain))
	return err
}

// OnceJSON prints the state one time as JSON: what top reads of /debug/state. Counters are totals.
func OnceJSON(ctx context.Context, addr string, w io.Writer) error {
	s, err := Fetch(ctx, addr)
	if err != nil {
		return err
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(s)
}

// Live draws the state in a terminal until ctx ends or the user quits.
func Live(ctx context.Context, addr string, interval time.Duration, in io.Reader, out io.Writer,
	more ...tea.ProgramOption) error {
	if _, err := Fetch(ctx, addr); err != nil {
		return err // before the terminal changes
	}
	opts := append([]tea.ProgramOption{tea.WithInput(in), tea.WithOutput(out),
		tea.WithoutSignalHandler()}, more...)
	p := tea.NewProgram(newModel(ctx, addr, interval), opts...)
	// Like a key, so that the terminal is restored and its readers are joined.
	defer context.AfterFunc(ctx, p.Quit)()
	_, err := p.Run()
	return err
}

// model is what the terminal library drives.
type model struct {
	ctx           context.Context
	addr          string
	interval      time.Duration
	prev, cur     *Snapshot
	err           error // of the last fetch; the last state stays on screen
	paused        bool
	top           int // first line shown
	width, height int
}

type (
	fetched struct {
		s   *Snapshot
		err error
	}
	due struct{}
)

func newModel(ctx context.Context, addr string, interval time.Duration) *model {
	return &model{ctx: ctx, addr: addr, interval: interval, width: 120, height: 40}
}

func (m *model) fetch() tea.Msg {
	s, err := Fetch(m.ctx, m.addr)
	return fetched{s, err}
}

// Init implements tea.Model.
func (m *model) Init() tea.Cmd { return m.fetch }

// Update implements tea.Model.
func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case fetched:
		m.err = msg.err
		if msg.err == nil && !m.paused {
			m.prev, m.cur = m.cur, msg.s
		}
		return m, tea.Tick(m.interval, func(time.Time) tea.Msg { return due{} })
	case due:
		return m, m.fetch
	case tea.KeyPressMsg:
		page := max(m.height-3, 1)
		switch msg.String() {
		case "q", "esc", "ctrl+c":
			return m, tea.Quit
		case "p", "space":
			m.paused = !m.paused
		case "up", "k":
			m.top--
		case "down", "j":
			m.top++
		case "pgup":
			m.top -= page
		case "pgdown":
			m.top += page
		case "home", "g":
			m.top = 0
		}
	}
	return m, nil
}

// View implements tea.Model.
func (m *model) View() tea.View {
	v := tea.NewView(m.text())
	v.AltScreen = true
	return v
}

// text is the visible part, and a line of help.
func (m *model) text() string {
	if m.cur == nil {
		return "asking " + m.addr + " ..."
	}
	lines := strings.Split(strings.TrimRight(Render(m.prev, m.cur, m.width, Coloured), "\n"), "\n")
	room := max(m.height-1, 1)
	m.top = max(min(m.top, len(lines)-room), 0)
	lines = lines[m.top:min(m.top+room, len(lines))]
	help := fmt.Sprintf("every %v  q quit  p pause  arrows scroll", m.interval)
	switch {
	case m.err != nil:
		help = Coloured.Bad.Render(fmt.Sprintf("state of %s; %v", m.cur.At.Format(time.TimeOnly), m.err))
	case m.paused:
		help = Coloured.Warn.Render("paused: p continues")
	}
	for len(lines) < room {
		lines = append(lines, "")
	}
	return strings.Join(append(lines, help), "\n")
}
