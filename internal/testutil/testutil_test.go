package testutil

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
)

func TestMustRun(t *testing.T) {
	for _, c := range []struct {
		list, feature string
		want          bool
	}{
		{"", "rdma", false},
		{"rdma", "rdma", true},
		{"vllm,rdma", "rdma", true},
		{"all", "rdma", true},
		{"rdma2", "rdma", false},
	} {
		if got := mustRun(c.list, c.feature); got != c.want {
			t.Errorf("mustRun(%q, %q) = %v", c.list, c.feature, got)
		}
	}
}

func TestSkipSkips(t *testing.T) {
	t.Setenv(MustRunEnv, "")
	ran := false
	t.Run("inner", func(t *testing.T) {
		Skip(t, "nothing", "shown by the test that asks")
		ran = true
	})
	if ran {
		t.Error("Skip returned")
	}
}

var kept []byte

func TestAllocates(t *testing.T) {
	if n := Allocates(func() { kept = make([]byte, 1<<20); kept = make([]byte, 1<<20) }); n < 2<<20 ||
		n > 2<<20+allocNoise {
		t.Errorf("twice a mebibyte, one of it garbage, is %d bytes", n)
	}
	AllocatesAtMost(t, 1<<20, "a mebibyte", func() { kept = make([]byte, 1<<20) })
}

// A child of InNamespace has another network namespace than its parent, with a loopback that works.
func TestInNamespace(t *testing.T) {
	const parent = "KVSPRAY_TEST_PARENT_NETNS"
	mine, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if os.Getenv(parent) == "" {
		t.Setenv(parent, mine)
	}
	if !InNamespace(t) {
		return
	}
	if mine == os.Getenv(parent) {
		t.Errorf("the child is in its parent's namespace %s", mine)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

// A test whose name has characters of patterns runs in the child as well, and one that the child
// lacks is no success.
func TestInNamespaceByName(t *testing.T) {
	t.Run("a+b (c)", func(t *testing.T) {
		if InNamespace(t) && !strings.HasPrefix(t.Name(), "TestInNamespaceByName/") {
			t.Errorf("the child runs as %s", t.Name())
		}
	})
	if os.Getenv(namespaceEnv) != "" {
		return
	}
	other := &renamed{TB: t}
	if InNamespace(other) {
		t.Fatal("this is a child of a test that is not there")
	}
	if !strings.Contains(other.failed, "ran no test of the name TestThatIsNotThere") {
		t.Errorf("a child that ran nothing: %q", other.failed)
	}
}

// renamed is a test under another name, which keeps its errors to itself.
type renamed struct {
	testing.TB
	failed string
}

func (*renamed) Helper()                        {}
func (*renamed) Name() string                   { return "TestThatIsNotThere" }
func (r *renamed) Errorf(f string, args ...any) { r.failed += fmt.Sprintf(f, args...) }
