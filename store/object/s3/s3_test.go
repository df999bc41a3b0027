package s3_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/s3"
	"github.com/kvspray/kvspray/store/page"
)

const size = 256 << 10

func key(i int) (k page.Key) {
	binary.LittleEndian.PutUint64(k[:], uint64(i)+1)
	return k
}

func content(i int) []byte {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8(key(i)).Read(b)
	return b
}

func owner(tb testing.TB, t *object.Tier) *object.Owner {
	tb.Helper()
	o, err := t.Owner(page.ID{1}, size, 0, 0)
	if err != nil {
		tb.Fatal(err)
	}
	return o
}

func add(tb testing.TB, o *object.Owner, from, to int) {
	tb.Helper()
	for i := from; i < to; i++ {
		k, data := key(i), content(i)
		if err := o.Add(&k, nil, data, mem.CRC32C(0, data), nil); err != nil {
			tb.Fatal(i, err)
		}
	}
}

func read(tb testing.TB, o *object.Owner, from, to int) (errs []error) {
	tb.Helper()
	var keys []page.Key
	var bufs [][]byte
	for i := from; i < to; i++ {
		keys, bufs = append(keys, key(i)), append(bufs, make([]byte, size))
	}
	errs = make([]error, len(keys))
	o.Read(context.Background(), keys, object.Reading{Buffers: bufs,
		Part:  func(int, int, int) {},
		Check: func(i int, crc uint32) bool { return mem.CRC32C(0, bufs[i]) == crc },
		End: func(i int, _ uint32, err error) {
			errs[i] = err
			if err == nil && !bytes.Equal(bufs[i], content(from+i)) {
				tb.Errorf("WRONG PAGE %d", from+i)
			}
		}})
	return errs
}

func all(tb testing.TB, errs []error, want error) {
	tb.Helper()
	for i, err := range errs {
		if !errors.Is(err, want) {
			tb.Fatalf("page %d: %v, want %v", i, err, want)
		}
	}
}

func closeTier(tb testing.TB, t *object.Tier) {
	tb.Helper()
	if err := t.Close(); err != nil {
		tb.Error(err)
	}
}

// Against a real server: pages come back after a restart, a removal stays, objects are deleted.
func TestRealServer(t *testing.T) {
	s := startServer(t)
	login(t, rootKey, rootSecret)
	tier := start(t, config(open(t, s.url, bucketName)))
	o := owner(t, tier)
	add(t, o, 0, 100)
	closeTier(t, tier)
	tier = start(t, config(open(t, s.url, bucketName)))
	o = owner(t, tier)
	all(t, read(t, o, 0, 100), nil)
	closeTier(t, tier)

	// A bit flips in the server's own file, and another file is cut.
	files, err := filepath.Glob(filepath.Join(s.dir, bucketName, "node1/pages/*"))
	if err != nil || len(files) < 3 {
		t.Fatal(files, err)
	}
	data, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-1] ^= 1
	if err := os.WriteFile(files[0], data, 0o644); err != nil {
		t.Fatal(err)
	}
	tier = start(t, config(open(t, s.url, bucketName)))
	o = owner(t, tier)
	if err := os.Truncate(files[1], int64(len(data)/2)); err != nil {
		t.Fatal(err)
	}
	good := 0
	for _, err := range read(t, o, 0, 100) {
		if err == nil {
			good++
		}
	}
	if st := tier.Stats(); good < 65 || good > 85 || st.Damaged != 1 || st.Missing == 0 {
		t.Errorf("%d pages are left, %+v", good, st)
	}
	if err := tier.Remove(t.Context(), page.ID{1}); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, 10*time.Second, "objects are deleted", func() bool {
		files, err = filepath.Glob(filepath.Join(s.dir, bucketName, "node1/pages/*"))
		return err == nil && len(files) == 0
	})
	closeTier(t, tier)
	tier = start(t, config(open(t, s.url, bucketName)))
	all(t, read(t, owner(t, tier), 0, 100), object.ErrMissing)
	closeTier(t, tier)
}

// A listing that goes on after the last name of a page has each name once, and a page is one
// request.
func TestListing(t *testing.T) {
	s := startServer(t)
	login(t, rootKey, rootSecret)
	dir := filepath.Join(s.dir, bucketName, "many")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	const names = 2*object.ListPage + 10
	for i := range names {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%016x", i)), nil,
			0o644); err != nil {
			t.Fatal(err)
		}
	}
	var requests atomic.Int64
	b := open(t, s.proxy(t, func(http.ResponseWriter, *http.Request) bool {
		requests.Add(1)
		return false
	}, nil), bucketName)
	defer b.Close()
	enough := errors.New("enough")
	after, total := "", 0
	for page := 1; total < names; page++ {
		n := 0
		err := b.List(t.Context(), "many/", after, func(name string, _ int64) error {
			if name != fmt.Sprintf("many/%016x", total) {
				t.Fatalf("%s is name %d", name, total)
			}
			after = name
			total++
			if n++; n == object.ListPage {
				return enough
			}
			return nil
		})
		if err != nil && !errors.Is(err, enough) {
			t.Fatal(err)
		}
		if got := requests.Load(); got != int64(page) {
			t.Fatalf("%d requests for %d pages", got, page)
		}
	}
}

// Mistakes are named with field, value and remedy, by Open.
func TestMistakes(t *testing.T) {
	s := startServer(t)
	s.user(t, serverPath(t))
	none := func(http.ResponseWriter, *http.Request) bool { return false }
	skewed := s.proxy(t, func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `<?xml version="1.0"?><Error><Code>RequestTimeTooSkewed</Code>`+
			`<Message>The difference is too large.</Message></Error>`)
		return true
	}, nil)
	noDelete := s.proxy(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodDelete {
			return none(w, r)
		}
		w.WriteHeader(http.StatusForbidden)
		_, _ = io.WriteString(w, `<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>`)
		return true
	}, nil)
	for _, c := range []struct {
		name, url, bucket, key, secret string
		want                           []string
	}{
		{"bucket", s.url, "nobucket", rootKey, rootSecret, []string{"bucket", "nobucket", "create it"}},
		{"key", s.url, bucketName, "nobody", rootSecret, []string{"credentials", "nobody", "renew"}},
		{"secret", s.url, bucketName, rootKey, "wrong", []string{"credentials", rootKey, "renew"}},
		{"right", s.url, bucketName, guestKey, guestSecret, []string{"credentials", guestKey,
			"s3:ListBucket", "allow"}},
		{"delete", noDelete, bucketName, rootKey, rootSecret, []string{"credentials",
			"may not use s3:DeleteObject", "allow"}},
		{"clock", skewed, bucketName, rootKey, rootSecret, []string{"clock", "NTP"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			login(t, c.key, c.secret)
			b := open(t, c.url, c.bucket)
			defer b.Close()
			_, err := object.Open(config(b))
			var mistake *object.ConfigError
			if !errors.As(err, &mistake) {
				t.Fatalf("%v", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not contain %q", err, w)
				}
			}
		})
	}
	for _, c := range []s3.Config{{Endpoint: "localhost:9000", Bucket: "b"}, {Endpoint: "http://h"},
		{Endpoint: "http://h/path", Bucket: "b"}} {
		if _, err := s3.Open(c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}

// The server is slow, answers 503, cuts bodies, or is gone: it costs time, and no page is wrong.
func TestFaultsOfServer(t *testing.T) {
	s := startServer(t)
	login(t, rootKey, rootSecret)
	var mode atomic.Value
	mode.Store("")
	var calls atomic.Int64
	url := s.proxy(t, func(w http.ResponseWriter, r *http.Request) bool {
		switch mode.Load() {
		case "503":
			w.WriteHeader(http.StatusServiceUnavailable)
			return true
		case "some 503":
			if calls.Add(1)%3 == 0 {
				w.WriteHeader(http.StatusServiceUnavailable)
				return true
			}
		case "slow":
			<-time.After(200 * time.Millisecond)
		case "stuck":
			<-r.Context().Done()
			return true
		}
		return false
	}, func(r *http.Response) error {
		if mode.Load() == "cut" && r.Request.Method == http.MethodGet && calls.Add(1)%2 == 0 {
			r.Body = struct {
				io.Reader
				io.Closer
			}{io.LimitReader(r.Body, size+77), r.Body}
		}
		return nil
	})
	tier := start(t, config(open(t, url, bucketName)))
	o := owner(t, tier)
	next := 0
	for _, m := range []string{"some 503", "slow", "cut"} {
		mode.Store(m)
		add(t, o, next, next+40)
		if err := tier.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		next += 40
		all(t, read(t, o, 0, next), nil)
	}
	for _, m := range []string{"503", "stuck"} {
		mode.Store(m)
		for _, err := range read(t, o, 0, 20) { // it ends, although no request does
			if err == nil {
				t.Error("a page came")
			}
		}
		if tier.Stats().Failed == 0 {
			t.Error("no request failed")
		}
		mode.Store("")
		k := key(0)
		testutil.Eventually(t, 40*time.Second, "it is asked again", func() bool { return o.Has(&k) })
		all(t, read(t, o, 0, next), nil)
	}
	closeTier(t, tier)
	tier = start(t, config(open(t, s.url, bucketName)))
	all(t, read(t, owner(t, tier), 0, next), nil)
	closeTier(t, tier)
}
