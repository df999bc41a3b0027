package s3_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/leaktest"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/s3"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// Credentials of the server's two users: one may do all, the other owns nothing.
const (
	rootKey, rootSecret   = "root-access", "root-secret-0123456789"
	guestKey, guestSecret = "guest-access", "guest-secret-0123456789"
)

// serverPath is the S3 server, which `make s3server` builds.
func serverPath(tb testing.TB) string {
	tb.Helper()
	root, err := filepath.Abs("../../..")
	if err != nil {
		tb.Fatal(err)
	}
	path := filepath.Join(root, ".build", "bin", "versitygw")
	if _, err := os.Stat(path); err != nil {
		testutil.Skip(tb, "s3server", "no "+path+"; run make s3server")
	}
	return path
}

// server is a real S3 server on a dir, with one bucket.
type server struct {
	url string
	dir string
}

const bucketName = "pages"

func startServer(tb testing.TB) *server {
	tb.Helper()
	path := serverPath(tb)
	base := tb.TempDir()
	s := &server{dir: filepath.Join(base, "data")}
	for _, d := range []string{filepath.Join(s.dir, bucketName), filepath.Join(base, "iam"),
		filepath.Join(base, "meta")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			tb.Fatal(err)
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	address := l.Addr().String()
	_ = l.Close() // the server takes it
	s.url = "http://" + address
	cmd := exec.Command(path, "--port", address, "--access", rootKey, "--secret", rootSecret,
		"--quiet", "--keep-alive", "--iam-dir", filepath.Join(base, "iam"), "posix", "--sidecar",
		filepath.Join(base, "meta"), s.dir)
	log, err := os.Create(filepath.Join(base, "log"))
	if err != nil {
		tb.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = cmd.Process.Kill() // it runs until then
		_ = cmd.Wait()
		_ = log.Close()
	})
	testutil.Eventually(tb, 20*time.Second, "the S3 server answers", func() bool {
		c, err := net.Dial("tcp", address)
		if err != nil {
			return false
		}
		return c.Close() == nil
	})
	return s
}

// user makes a user who owns nothing.
func (s *server) user(tb testing.TB, path string) {
	tb.Helper()
	out, err := exec.Command(path, "admin", "--access", rootKey, "--secret", rootSecret,
		"--endpoint-url", s.url, "create-user", "--access", guestKey, "--secret", guestSecret,
		"--role", "user").CombinedOutput()
	if err != nil {
		tb.Fatalf("%v: %s", err, out)
	}
}

// proxy stands before the server: handle changes a request or an answer, or returns true if it has
// answered itself.
func (s *server) proxy(tb testing.TB, handle func(w http.ResponseWriter, r *http.Request) bool,
	answer func(*http.Response) error) string {
	tb.Helper()
	to, err := url.Parse(s.url)
	if err != nil {
		tb.Fatal(err)
	}
	transport := &http.Transport{}
	p := &httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host = to.Scheme, to.Host // Host stays: it is signed
	}, ModifyResponse: answer, ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) {
		w.WriteHeader(http.StatusBadGateway)
	}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	h := &http.Server{ReadHeaderTimeout: time.Minute, ErrorLog: nil,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !handle(w, r) {
				p.ServeHTTP(w, r)
			}
		})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = h.Serve(l) // until Close
	}()
	tb.Cleanup(func() {
		_ = h.Close()
		<-done
		transport.CloseIdleConnections()
	})
	return "http://" + l.Addr().String()
}

// login sets the credentials of this test's process.
func login(tb testing.TB, key, secret string) {
	tb.Helper()
	for k, v := range map[string]string{"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret,
		"AWS_SESSION_TOKEN": "", "AWS_REGION": "", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
		"AWS_EC2_METADATA_DISABLED": "true"} {
		tb.Setenv(k, v)
	}
}

func open(tb testing.TB, url, bucket string) object.Bucket {
	tb.Helper()
	b, err := s3.Open(s3.Config{Endpoint: url, Bucket: bucket, Timeout: time.Second})
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

func config(b object.Bucket) object.Config {
	return object.Config{Bucket: b, Prefix: "node1", Size: 1 << 30,
		ObjectBytes: object.MinObjectBytes, Timeouts: object.Timeouts{Open: 5 * time.Second,
			Read: 3 * time.Second, Small: 5 * time.Second, Upload: 20 * time.Second}}
}

func start(tb testing.TB, c object.Config) *object.Tier {
	tb.Helper()
	t, err := object.Open(c)
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := t.Ready(ctx); err != nil {
		tb.Fatal(fmt.Errorf("%w: %+v", err, t.Stats()))
	}
	return t
}
