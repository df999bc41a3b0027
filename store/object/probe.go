package object

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// probe tests at a start what the store relies on and a service with the API of S3 may ignore:
// lists go forward, and a Put whose condition does not hold fails. Without the first a start has no
// end, and without the second two processes replace each other's removals. It writes and deletes
// two objects of a few bytes, whose names no other process has. A process that is killed here
// leaves them.
func (t *Tier) probe(ctx context.Context, limit time.Duration) (err error) {
	prefix := fmt.Sprintf("%sprobe/%x/", t.c.Prefix, t.ledger.process)
	names := [2]string{prefix + "1", prefix + "2"}
	var tags [2]string
	defer func() {
		for _, name := range names {
			err = errors.Join(err, t.deleteName(ctx, name, limit))
		}
	}()
	put := func(i int, content string, when Condition) error {
		_, err := try(ctx, t, limit, "write "+names[i], func(ctx context.Context) (int, error) {
			tag, err := t.c.Bucket.Put(ctx, names[i], []byte(content), when)
			if err == nil {
				tags[i] = tag
			}
			return 0, err
		})
		return err
	}
	for i, name := range names {
		if err := put(i, name, Condition{}); err != nil {
			return err
		}
	}
	if _, err := t.listSome(ctx, limit, prefix, names[0], len(names)); err != nil {
		return err
	}
	for _, c := range []struct {
		header string
		when   Condition
	}{{"If-None-Match: *", Condition{Absent: true}}, {"If-Match", Condition{Tag: tags[0]}}} {
		err := put(1, names[1], c.when)
		if err == nil {
			return &ConfigError{"endpoint", names[1], "was replaced, although the condition " + c.header +
				" did not hold", "use an object store with conditional writes (If-Match, If-None-Match)"}
		}
		if !errors.Is(err, ErrChanged) {
			return err
		}
	}
	return nil
}
