package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
)

// After SIGHUP the router has the engines of the file; a file with a mistake changes nothing, and
// the log names the key.
func TestReloadOfTheRouter(t *testing.T) {
	dir := t.TempDir()
	file, ready := filepath.Join(dir, "router.yaml"), filepath.Join(dir, "ready.json")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	engine := func(port int) string {
		return fmt.Sprintf("engines: [{url: 'http://127.0.0.1:%d', role: decode}]\n", port)
	}
	write(engine(1) + "max_body: 1MiB\n")
	ctx, cancel := context.WithCancel(t.Context())
	log := &testutil.Buffer{}
	cmd := proxyCommand()
	cmd.SetArgs([]string{"--config", file, "--listen", "127.0.0.1:0", "--ready-file", ready})
	cmd.SetErr(log)
	done := make(chan error, 1)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	wait := func(what string, ok func() bool) {
		t.Helper()
		testutil.Eventually(t, time.Minute, what, ok)
	}
	var at struct{ HTTP string }
	wait("the router does not listen", func() bool {
		text, err := os.ReadFile(ready)
		return err == nil && json.Unmarshal(text, &at) == nil
	})
	has := func(engine string) bool {
		resp, err := http.Get("http://" + at.HTTP + "/health")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		return err == nil && strings.Contains(string(text), engine)
	}
	wait("the router does not serve", func() bool { return has("127.0.0.1:1\"") })
	hup := func() {
		t.Helper()
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	write(engine(2) + "max_body: 2MiB\n")
	hup()
	wait("other settings are not named", func() bool {
		return strings.Contains(log.String(), "keys=[max_body]")
	})
	if !has("127.0.0.1:2\"") || has("127.0.0.1:1\"") {
		t.Error("the engines are not those of the file")
	}
	write(engine(3) + "max_bdy: 1\n")
	hup()
	wait("the mistake is not named", func() bool { return strings.Contains(log.String(), "max_bdy") })
	if !has("127.0.0.1:2\"") {
		t.Error("a file with a mistake changes the engines")
	}
}
