package store

import (
	"bufio"
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
	"golang.org/x/sys/unix"
)

const (
	soakEnv      = "KVSPRAY_STORE_SOAK"
	soakChildEnv = "KVSPRAY_STORE_SOAK_CHILD"

	soakWorkers    = 4
	soakNamespaces = 4  // of each worker
	soakPages      = 90 // of each namespace
	soakDisk       = 1<<20 + 40*simSegment
)

// A process with all tiers, on a real file and with a bucket that outlives it, is killed with
// SIGKILL at any moment, or ends, again and again. Several workers put, get, pin, cancel, remove
// open and closed namespaces, and give namespaces up; the disk and the bucket fail, damage what
// they return, or are late. Every page that the store returns is compared, and no page is one of a
// namespace that was removed since its put. KVSPRAY_STORE_SOAK=1h makes it longer.
func TestSoak(t *testing.T) {
	long := 2 * time.Second
	if text := os.Getenv(soakEnv); text != "" {
		var err error
		if long, err = time.ParseDuration(text); err != nil {
			t.Fatal(soakEnv, ": ", err)
		}
	}
	b := &soakBucket{t: t, objects: objecttest.New(), counts: map[string]int{}}
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "bucket"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: b}
	served := make(chan struct{})
	go func() { defer close(served); _ = server.Serve(l) }()
	defer func() { _ = server.Close(); <-served }()
	kills, ends := 0, 0
	for end := time.Now().Add(long); time.Now().Before(end) && !t.Failed(); {
		if rand.IntN(4) > 0 {
			kills++
			b.child(dir, true)
		} else {
			ends++
			b.child(dir, false)
		}
	}
	b.child(dir, false) // a last look at all pages
	b.mu.Lock()
	defer b.mu.Unlock()
	t.Logf("%v, %d times killed, %d times ended: %v", long, kills, ends, b.counts)
	if long >= time.Minute && (b.counts["hits after a start"] == 0 || b.counts["removals"] == 0 ||
		b.counts["hits"] == 0) {
		t.Error("it has tried nothing")
	}
}

// child runs one process, which is killed soon, or ends.
func (b *soakBucket) child(dir string, kill bool) {
	var out bytes.Buffer
	cmd := exec.Command(os.Args[0], "-test.run=^TestSoakChild$")
	cmd.Env = append(os.Environ(), soakChildEnv+"="+dir)
	cmd.Stdout, cmd.Stderr = &out, &out
	stdin, err := cmd.StdinPipe()
	if err != nil {
		b.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	over := time.After(time.Duration(20+rand.IntN(4000)) * time.Millisecond)
	for changes := time.NewTicker(300 * time.Millisecond); ; {
		select {
		case <-changes.C:
			b.change()
			continue
		case err := <-ended:
			b.t.Fatalf("it has ended: %v\n%s", err, &out)
		case <-over:
		}
		changes.Stop()
		break
	}
	if kill {
		_ = cmd.Process.Kill()
		if err := <-ended; cmd.ProcessState.Exited() {
			b.t.Fatalf("it has ended: %v\n%s", err, &out)
		}
		return
	}
	_ = stdin.Close()
	hangs := time.AfterFunc(5*time.Minute, func() { _ = cmd.Process.Signal(unix.SIGQUIT) })
	defer hangs.Stop()
	if err := <-ended; err != nil {
		b.t.Fatalf("%v\n%s", err, &out)
	}
}

// soakBucket serves a bucket to the processes, over a unix socket. A request goes on after its
// process has given it up, or has ended.
type soakBucket struct {
	t       *testing.T
	objects *objecttest.Store
	mu      sync.Mutex // guards counts
	counts  map[string]int
}

// soakRequest is one call of an object.Bucket, or counts of the child.
type soakRequest struct {
	Op, Name, After string
	Off, N          int64
	Data            []byte
	When            object.Condition
	Counts          map[string]int
}

type soakReply struct {
	Data  []byte
	Tag   string
	Names []string
	Sizes []int64
	Code  int // of soakErrors, from 1 on
	Err   string
}

var soakErrors = []error{object.ErrNotFound, object.ErrShort, object.ErrChanged,
	io.ErrUnexpectedEOF}

func (b *soakBucket) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var q soakRequest
	if gob.NewDecoder(r.Body).Decode(&q) != nil {
		return // its process was killed
	}
	var a soakReply
	var err error
	p, ctx := b.objects.Open(), context.Background()
	switch q.Op {
	case "get":
		var body io.ReadCloser
		if body, err = p.Get(ctx, q.Name, q.Off, q.N); err == nil {
			a.Data, err = io.ReadAll(body)
			_ = body.Close()
		}
	case "load":
		a.Data, a.Tag, err = p.Load(ctx, q.Name)
	case "put":
		a.Tag, err = p.Put(ctx, q.Name, q.Data, q.When)
	case "list":
		err = p.List(ctx, q.Name, q.After, func(name string, size int64) error {
			a.Names, a.Sizes = append(a.Names, name), append(a.Sizes, size)
			return nil
		})
	case "delete":
		err = p.Delete(ctx, q.Name)
	case "count":
		b.mu.Lock()
		for what, n := range q.Counts {
			b.counts[what] += n
		}
		b.mu.Unlock()
	}
	if err != nil {
		a.Code, a.Err = 1+slices.IndexFunc(soakErrors, func(e error) bool {
			return errors.Is(err, e)
		}), err.Error()
	}
	_ = gob.NewEncoder(w).Encode(&a)
}

// change has the bucket's requests fail in another way, or be late, or not.
func (b *soakBucket) change() {
	b.objects.Deliver()
	if rand.IntN(2) == 0 {
		b.objects.Fail(nil)
		return
	}
	kind, every := rand.IntN(6), int64(1+rand.IntN(5))
	var n atomic.Int64
	b.objects.Fail(func(op, _ string) objecttest.Fault {
		if n.Add(1)%every != 0 {
			return objecttest.Fault{}
		}
		switch kind {
		case 0:
			return objecttest.Fault{Err: errors.New("503")}
		case 1:
			return objecttest.Fault{Lost: errors.New("no answer")}
		case 2:
			return objecttest.Fault{Cut: 5000}
		case 3:
			return objecttest.Fault{Flip: 3000}
		case 4:
			if op == "put" || op == "delete" {
				return objecttest.Fault{Late: errors.New("no answer")}
			}
		}
		hold := make(chan struct{})
		time.AfterFunc(time.Duration(rand.IntN(400))*time.Millisecond, func() { close(hold) })
		return objecttest.Fault{Hold: hold}
	})
}

// soakClient is the bucket in the child.
type soakClient struct{ http *http.Client }

func newSoakClient(dir string) *soakClient {
	return &soakClient{&http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, "bucket"))
		}}}}
}

func (c *soakClient) do(ctx context.Context, q soakRequest) (a soakReply, err error) {
	var body bytes.Buffer
	if err := gob.NewEncoder(&body).Encode(&q); err != nil {
		return a, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://bucket/", &body)
	if err != nil {
		return a, err
	}
	resp, err := c.http.Do(r)
	if err != nil {
		return a, err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := gob.NewDecoder(resp.Body).Decode(&a); err != nil {
		return a, err
	}
	switch {
	case a.Code > 0:
		return a, soakErrors[a.Code-1]
	case a.Err != "":
		return a, errors.New(a.Err)
	}
	return a, nil
}

func (c *soakClient) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	a, err := c.do(ctx, soakRequest{Op: "get", Name: name, Off: off, N: n})
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF) && len(a.Data) > 0: // it was cut
		return io.NopCloser(io.MultiReader(bytes.NewReader(a.Data), cutOff{})), nil
	case err != nil:
		return nil, err
	}
	return io.NopCloser(bytes.NewReader(a.Data)), nil
}

type cutOff struct{}

func (cutOff) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func (c *soakClient) Load(ctx context.Context, name string) ([]byte, string, error) {
	a, err := c.do(ctx, soakRequest{Op: "load", Name: name})
	return a.Data, a.Tag, err
}

func (c *soakClient) Put(ctx context.Context, name string, data []byte,
	when object.Condition) (string, error) {
	a, err := c.do(ctx, soakRequest{Op: "put", Name: name, Data: data, When: when})
	return a.Tag, err
}

func (c *soakClient) List(ctx context.Context, prefix, after string,
	each func(string, int64) error) error {
	a, err := c.do(ctx, soakRequest{Op: "list", Name: prefix, After: after})
	for i, name := range a.Names {
		if err == nil {
			err = each(name, a.Sizes[i])
		}
	}
	return err
}

func (c *soakClient) Delete(ctx context.Context, name string) error {
	_, err := c.do(ctx, soakRequest{Op: "delete", Name: name})
	return err
}

func (c *soakClient) Close() { c.http.CloseIdleConnections() }

// soakFile is a real file whose operations fail now and then.
type soakFile struct {
	*os.File
	fault atomic.Pointer[soakFaults]
}

type soakFaults struct {
	op    string
	from  int64 // offset of the first byte that fails
	every int64
	n     atomic.Int64
}

func (f *soakFile) step(op string, off int64) error {
	if x := f.fault.Load(); x != nil && x.op == op && off >= x.from && x.n.Add(1)%x.every == 0 {
		return unix.EIO
	}
	return nil
}

func (f *soakFile) ReadAt(p []byte, off int64) error {
	if err := f.step("read", off); err != nil {
		return err
	}
	_, err := f.File.ReadAt(p, off)
	return err
}

func (f *soakFile) WriteAt(bufs [][]byte, off int64) error {
	for i, b := range bufs {
		if i == len(bufs)-1 { // the rest may be there
			if err := f.step("write", off); err != nil {
				return err
			}
		}
		if _, err := f.File.WriteAt(b, off); err != nil {
			return err
		}
		off += int64(len(b))
	}
	return nil
}

func (f *soakFile) Sync() error {
	if err := f.step("sync", 0); err != nil {
		return err
	}
	return f.File.Sync()
}

// change has the file fail in another way, or work.
func (f *soakFile) change() {
	if rand.IntN(2) == 0 {
		f.fault.Store(nil)
		return
	}
	f.fault.Store(&soakFaults{op: []string{"read", "write", "sync"}[rand.IntN(3)],
		every: int64(1 + rand.IntN(4))})
}

// soakFault ends the process: the test that runs it shows the text.
type soakFault struct{}

func (soakFault) Helper() {}

func (soakFault) Fatal(what ...any) {
	fmt.Fprintln(os.Stderr, append([]any{"FAULT:"}, what...)...)
	os.Exit(3)
}

func (f soakFault) Fatalf(format string, what ...any) { f.Fatal(fmt.Sprintf(format, what...)) }

// soakChild is the process that is killed.
type soakChild struct {
	soakFault
	s      *Store
	file   *soakFile
	client *soakClient
	mu     sync.Mutex // guards what follows
	log    *os.File   // what may be there, which the next process reads
	counts map[string]int
}

// soakSpace is a namespace of one worker.
type soakSpace struct {
	name string
	size int
	may  map[int]bool // pages that the store may have
	e    *engine      // nil: it is closed
}

func soakName(worker, n int) string { return fmt.Sprintf("w%d-n%d", worker, n) }

// TestSoakChild is the process that TestSoak kills.
func TestSoakChild(t *testing.T) {
	dir := os.Getenv(soakChildEnv)
	if dir == "" {
		return
	}
	c := &soakChild{client: newSoakClient(dir), counts: map[string]int{}}
	over := make(chan struct{})
	go func() { defer close(over); _, _ = io.Copy(io.Discard, os.Stdin) }()
	spaces := c.load(filepath.Join(dir, "model"))
	c.open(filepath.Join(dir, "disk"))
	c.verify(spaces, "after a start")
	c.file.fault.Store(nil)
	if rand.IntN(2) == 0 {
		ctx, stop := context.WithTimeout(context.Background(), 2*time.Second)
		_ = c.s.object.Ready(ctx) // the bucket may be away
		stop()
		c.verify(spaces, "after the bucket was listed")
	}
	var workers sync.WaitGroup
	for w := range soakWorkers {
		workers.Go(func() { c.work(spaces[w*soakNamespaces:][:soakNamespaces], over) })
	}
	workers.Go(func() {
		for tick := time.NewTicker(100 * time.Millisecond); ; {
			select {
			case <-tick.C:
				c.file.change()
				c.report()
			case <-over:
				tick.Stop()
				return
			}
		}
	})
	workers.Wait()
	c.file.fault.Store(nil)
	ctx, stop := context.WithTimeout(context.Background(), 2*time.Second)
	_ = c.s.Flush(ctx)
	stop()
	c.verify(spaces, "before the end")
	for _, sp := range spaces {
		sp.close()
	}
	_ = c.s.Close() // its bucket may be away
	c.report()
	c.client.Close()
}

func (c *soakChild) count(what string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[what] += n
}

func (c *soakChild) report() {
	c.mu.Lock()
	counts := c.counts
	c.counts = map[string]int{}
	c.mu.Unlock()
	_, _ = c.client.do(context.Background(), soakRequest{Op: "count", Counts: counts})
}

// note appends one line to the model in one write, which SIGKILL cannot tear. "may": the store may
// have these pages from now on; "gone": it has none but these.
func (c *soakChild) note(word string, sp *soakSpace, pages []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.log.WriteString(soakLine(word, sp.name, pages)); err != nil {
		c.Fatal(err)
	}
}

func soakLine(word, name string, pages []int) string {
	fields := []string{word, name}
	for _, p := range pages {
		fields = append(fields, strconv.Itoa(p))
	}
	return strings.Join(fields, " ") + "\n"
}

// load reads the model that earlier processes have written, and writes it anew.
func (c *soakChild) load(path string) (spaces []*soakSpace) {
	named := map[string]*soakSpace{}
	for i := range soakWorkers * soakNamespaces {
		sp := &soakSpace{name: soakName(i/soakNamespaces, i%soakNamespaces),
			size: []int{4096, 9_999}[i%2], may: map[int]bool{}}
		named[sp.name] = sp
		spaces = append(spaces, sp)
	}
	if f, err := os.Open(path); err == nil {
		for lines := bufio.NewScanner(f); lines.Scan(); {
			fields := strings.Fields(lines.Text())
			sp := named[fields[1]]
			if fields[0] == "gone" {
				clear(sp.may)
			}
			for _, field := range fields[2:] {
				p, err := strconv.Atoi(field)
				if err != nil {
					c.Fatal(err)
				}
				sp.may[p] = true
			}
		}
		_ = f.Close()
	}
	var text strings.Builder
	for _, sp := range spaces {
		text.WriteString(soakLine("may", sp.name, slices.Sorted(maps.Keys(sp.may))))
	}
	if err := os.WriteFile(path+".new", []byte(text.String()), 0o600); err != nil {
		c.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		c.Fatal(err)
	}
	var err error
	if c.log, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0); err != nil {
		c.Fatal(err)
	}
	return spaces
}

// open starts the store. Some starts cannot read segments.
func (c *soakChild) open(path string) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = f.Truncate(soakDisk)
	}
	if err != nil {
		c.Fatal(err)
	}
	c.file = &soakFile{File: f}
	if rand.IntN(8) == 0 {
		c.file.fault.Store(&soakFaults{op: "read", from: 1 << 20, every: int64(1 + rand.IntN(3))})
	}
	tier, err := disk.OpenFiles([]disk.OpenDevice{{Path: path, File: c.file, Size: soakDisk}},
		disk.Config{SegmentBytes: simSegment, MaxPages: 2048})
	if err != nil {
		c.Fatal(err)
	}
	objects, err := object.Open(object.Config{Bucket: c.client, Prefix: "node", Size: 32 << 20,
		ObjectBytes: object.MinObjectBytes, MaxPages: 2048, Buffers: 4, Timeouts: object.Timeouts{
			Open: 200 * time.Millisecond, Read: 200 * time.Millisecond,
			Small: 200 * time.Millisecond, Upload: 300 * time.Millisecond,
			Close: 300 * time.Millisecond}})
	if err != nil {
		c.Fatal(err)
	}
	c.s, err = Open(Config{Opened: tier, OpenedObject: objects, Memory: inMemoryConfig(),
		Workers: 4, Fetchers: 2, EraseWithin: 50 * time.Millisecond,
		WriteBack: rand.IntN(2) == 0, ObjectAtPut: rand.IntN(2) == 0})
	if err != nil {
		c.Fatal(err)
	}
}

func (c *soakChild) space(sp *soakSpace) *engine {
	if sp.e == nil {
		sp.e = newEngine(c, c.s, sp.name, sp.size)
	}
	return sp.e
}

func (sp *soakSpace) close() {
	if sp.e != nil {
		sp.e.close()
		sp.e = nil
	}
}

// get compares pages, and looks whether the store may have them.
func (c *soakChild) get(sp *soakSpace, pages []int, when string) {
	rs := c.space(sp).get(pages...)
	for i, r := range rs {
		if r.Outcome == Hit && !sp.may[pages[i]] {
			c.Fatalf("%s, page %d%s: it was removed, or never put: %+v", sp.name, pages[i], when, r)
		}
	}
	c.count("pages asked for", len(rs))
	c.count("hits", count(rs, Hit))
	if when != "" {
		c.count("hits "+when, count(rs, Hit))
	}
}

func (c *soakChild) verify(spaces []*soakSpace, when string) {
	for _, sp := range spaces {
		for from := 0; from < soakPages; from += 45 {
			c.get(sp, upTo(from, from+45), when)
		}
	}
}

// put stores pages with an engine.
func (c *soakChild) put(sp *soakSpace, e *engine, pages []int) {
	rs := e.put(pages...)
	c.count("pages put", len(rs))
	c.count("refused or failed", len(rs)-count(rs, Stored)-count(rs, Existed))
}

func (sp *soakSpace) mayHave(pages []int) {
	for _, p := range pages {
		sp.may[p] = true
	}
}

// remove removes the namespace while it is open or closed, or while pages are put.
func (c *soakChild) remove(sp *soakSpace, id page.ID, pages []int) {
	var putting sync.WaitGroup
	if rand.IntN(3) > 0 {
		pages = nil
	} else {
		sp.mayHave(pages)
		c.note("may", sp, pages)
		putting.Go(func() {
			e := newEngine(c, c.s, sp.name, sp.size)
			defer e.close()
			c.put(sp, e, pages)
		})
	}
	var err error
	what := "removals"
	if sp.e != nil && rand.IntN(2) == 0 {
		err = sp.e.space.Remove()
	} else {
		if sp.e == nil {
			what = "removals of closed namespaces"
		}
		err = c.s.RemoveSpace(id)
	}
	if err != nil {
		what += " that failed"
	} else {
		clear(sp.may)
		sp.mayHave(pages)
		c.note("gone", sp, pages) // the put may have ended after the removal
	}
	c.count(what, 1)
	putting.Wait()
}

// work does one thing after the other with a worker's namespaces.
func (c *soakChild) work(spaces []*soakSpace, over chan struct{}) {
	var pins *Pins
	defer func() {
		if pins != nil {
			pins.Release()
		}
	}()
	for {
		select {
		case <-over:
			return
		default:
		}
		sp := spaces[rand.IntN(len(spaces))]
		from := rand.IntN(soakPages - 25)
		pages := upTo(from, from+1+rand.IntN(25))
		ns := namespace(sp.name, sp.size)
		switch kind := rand.IntN(100); {
		case kind < 34:
			sp.mayHave(pages)
			c.note("may", sp, pages)
			c.put(sp, c.space(sp), pages)
		case kind < 70:
			c.get(sp, pages, "")
		case kind < 75:
			c.remove(sp, ns.ID(), pages)
		case kind < 79: // memory gives all up
			c.s.memory.RemoveOwner(c.space(sp).space.number)
			c.get(sp, pages, "")
		case kind < 82:
			ctx, stop := context.WithTimeout(context.Background(), 100*time.Millisecond)
			_ = c.s.Flush(ctx)
			stop()
		case kind < 85:
			if pins != nil {
				pins.Release()
			}
			e := c.space(sp)
			var err error
			if pins, err = e.space.Pin(e.keys(pages)); err != nil {
				pins = nil // too many are pinned
			}
		case kind < 88:
			e := c.space(sp)
			b, err := e.space.Get(e.keys(pages), e.pool, e.blocks(len(pages)))
			if err != nil {
				c.Fatal(err)
			}
			b.Cancel()
			<-b.Done()
			c.count("cancelled gets", 1)
		case kind < 91: // as for another namespace, when all numbers are in use
			sp.close()
			c.giveUp(ns.ID())
		default:
			sp.close()
		}
	}
}

func (c *soakChild) giveUp(id page.ID) {
	c.s.mu.Lock()
	sp := c.s.spaces[id]
	c.s.mu.Unlock()
	if sp == nil {
		return
	}
	c.s.memory.RemoveOwner(sp.number)
	c.s.disk.Forget(sp.number)
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.reclaimLocked()
	c.count("given up", 1)
}
