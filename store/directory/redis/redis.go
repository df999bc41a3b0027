// Package redis is a directory in a Redis or Valkey service, or a cluster of either.
//
// A page has a sorted set of its holders, by the end of their hints. The set has the longest of
// these times to live, so the service forgets what is not repeated. Answers are foreign: a member
// that is no holder is skipped. The service has hints only: it may lose all of them.
package redis

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/redact"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/page"
	"github.com/kvspray/kvspray/transfer"
)

// Bounds and times.
const (
	// ttl is how long a hint counts. Holders repeat theirs in a third of it.
	ttl       = 15 * time.Minute
	dialTime  = 2 * time.Second
	callTime  = time.Second
	pipeKeys  = 1000 // of one pipeline
	poolConns = 16
)

// Options make a Directory.
type Options struct {
	Self      transfer.Boot
	Addresses []string // several: of a cluster
	Username  string
	Password  redact.Secret
	TLS       bool
	Prefix    string // of all keys
}

// Directory is the directory as this process uses it.
type Directory struct {
	self   transfer.Boot
	prefix string
	client redis.UniversalClient
	secret redact.Secret // the password
	now    func() time.Time
}

// New makes a directory. It does not connect: a service that is away costs misses.
func New(o Options) *Directory {
	c := &redis.UniversalOptions{Addrs: o.Addresses, Username: o.Username,
		Password: o.Password.Reveal(), DialTimeout: dialTime, ReadTimeout: callTime,
		WriteTimeout: callTime, PoolSize: poolConns, MaxRetries: 1, ContextTimeoutEnabled: true}
	if o.TLS {
		c.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	return &Directory{self: o.Self, prefix: o.Prefix, secret: o.Password,
		client: redis.NewUniversalClient(c), now: time.Now}
}

// Configured makes a directory from its part of the configuration.
func Configured(self transfer.Boot, c *config.StoreRedis) (*Directory, error) {
	o := Options{Self: self, Addresses: c.Addresses, Username: c.Username, TLS: c.TLS,
		Prefix: c.Prefix}
	if c.PasswordFile != "" {
		b, err := os.ReadFile(c.PasswordFile)
		if err != nil {
			return nil, fmt.Errorf("store.redis.password_file: %w", err)
		}
		o.Password = redact.NewSecret(strings.TrimSpace(string(b)))
	}
	return New(o), nil
}

// Close implements directory.Directory.
func (d *Directory) Close() error {
	if err := d.client.Close(); err != nil && !errors.Is(err, redis.ErrClosed) {
		return fmt.Errorf("directory in redis: %w", err)
	}
	return nil
}

// format is part of all keys, and raised with each change of what they contain. Members of another
// format have other keys: neither reads the other's, which the service forgets after ttl.
const format = "1:"

func (d *Directory) key(k *page.Key) string {
	s := directory.ShortOf(k)
	return d.prefix + format + string(s[:])
}

// holder reads a member of a set: the boot of a process.
func holder(s string) (boot transfer.Boot, ok bool) {
	if len(s) != len(boot) {
		return boot, false
	}
	return transfer.Boot([]byte(s)), true
}

// each runs a pipeline for every part of the keys.
func (d *Directory) each(ctx context.Context, keys []page.Key,
	add func(redis.Pipeliner, *page.Key)) error {
	for len(keys) > 0 {
		n := min(len(keys), pipeKeys)
		p := d.client.Pipeline()
		for i := range n {
			add(p, &keys[i])
		}
		keys = keys[n:]
		if cmds, err := p.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
			for _, c := range cmds { // a refusal explains more than a timeout
				var answer redis.Error
				if errors.As(c.Err(), &answer) && !errors.Is(answer, redis.Nil) {
					return d.explain(answer)
				}
			}
			return d.explain(err)
		}
	}
	return nil
}

// down is an error of the service itself, with what an operator can do about it.
type down struct {
	err error
	do  string
}

func (d *down) Error() string        { return "directory in redis: " + d.err.Error() + d.do }
func (d *down) Unwrap() error        { return d.err }
func (d *down) Is(target error) bool { return target == directory.ErrDown }

// remedies are by the first word of an error.
var remedies = []struct{ word, do string }{
	{"NOAUTH", "set store.redis.password_file"},
	{"WRONGPASS", "correct store.redis.username and store.redis.password_file"},
	{"NOPERM", "let the user of store.redis.username use ZADD, ZREM, ZREMRANGEBYSCORE, EXPIRE and " +
		"ZREVRANGEBYSCORE on keys that begin with store.redis.prefix"},
	{"READONLY", "name the primary in store.redis.addresses"},
	{"OOM", "raise its maxmemory, or set maxmemory-policy to volatile-ttl"},
	{"LOADING", "wait until it has read its data"},
	{"MOVED", "name several nodes of the cluster in store.redis.addresses"},
	{"CLUSTERDOWN", "repair the cluster"},
}

// explain adds the remedy to an error, and hides the password: the service repeats the arguments of
// commands that it does not support, such as those of AUTH.
func (d *Directory) explain(err error) error {
	if shown := d.secret.Hide(err.Error()); shown != err.Error() {
		return &down{errors.New(shown), ""}
	}
	for _, r := range remedies {
		if redis.HasErrorPrefix(err, r.word) {
			return &down{err, ": " + r.do}
		}
	}
	var answer redis.Error
	var at *net.OpError
	switch {
	case errors.As(err, &at) && at.Op == "dial" && !at.Timeout():
		return &down{err, ": start it, or correct store.redis.addresses"}
	case errors.As(err, &answer):
		return &down{err, ""}
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("directory in redis: no answer in time: %w: start the service of "+
			"store.redis.addresses, or find what delays it", err)
	}
	return fmt.Errorf("directory in redis: %w", err)
}

// Announce implements directory.Directory.
func (d *Directory) Announce(ctx context.Context, held []page.Key) error {
	now := d.now()
	z := redis.Z{Score: float64(now.Add(ttl).Unix()), Member: string(d.self[:])}
	over := strconv.FormatInt(now.Unix(), 10)
	return d.each(ctx, held, func(p redis.Pipeliner, k *page.Key) {
		key := d.key(k)
		p.ZAdd(ctx, key, z)
		p.ZRemRangeByScore(ctx, key, "-inf", over)
		p.Expire(ctx, key, ttl)
	})
}

// Withdraw implements directory.Directory.
func (d *Directory) Withdraw(ctx context.Context, gone []page.Key) error {
	return d.each(ctx, gone, func(p redis.Pipeliner, k *page.Key) {
		p.ZRem(ctx, d.key(k), string(d.self[:]))
	})
}

// Lookup implements directory.Directory.
func (d *Directory) Lookup(ctx context.Context, keys []page.Key, found *directory.Found) error {
	if len(keys) > directory.MaxBatch {
		return fmt.Errorf("directory in redis: %d keys: at most %d", len(keys), directory.MaxBatch)
	}
	by := &redis.ZRangeBy{Min: "(" + strconv.FormatInt(d.now().Unix(), 10), Max: "+inf",
		Count: directory.MaxHolders}
	answers := make([]*redis.StringSliceCmd, 0, len(keys))
	err := d.each(ctx, keys, func(p redis.Pipeliner, k *page.Key) {
		answers = append(answers, p.ZRevRangeByScore(ctx, d.key(k), by))
	})
	for i, a := range answers {
		for j, s := range a.Val() {
			if h, ok := holder(s); ok && j < directory.MaxHolders {
				found.Add(i, h)
			}
		}
	}
	return err
}
