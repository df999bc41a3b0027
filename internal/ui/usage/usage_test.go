package usage

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"
)

func TestIs(t *testing.T) {
	m := Errorf("--json: %w", fs.ErrNotExist)
	for _, err := range []error{m, Of(fs.ErrNotExist), fmt.Errorf("bench: %w", m),
		errors.Join(errors.New("other"), m)} {
		if !Is(err) || !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%v: no usage error, or no cause", err)
		}
	}
	if m.Error() != "--json: file does not exist" {
		t.Error(m)
	}
	if Of(nil) != nil || Is(nil) || Is(fs.ErrNotExist) {
		t.Error("another error became a usage error")
	}
}
