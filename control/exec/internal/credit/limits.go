package credit

import (
	"github.com/kvspray/kvspray/control/lease"
)

// Limits are the credits that one peer has given us: when each of them expires. The zero value is
// ready.
type Limits struct {
	ends map[Rail]Instant
	next Instant // the earliest end
}

// Set records a credit; 0 bytes lift it.
func (l *Limits) Set(now Instant, r Rail, bytes uint64) {
	if bytes == 0 {
		delete(l.ends, r)
	} else {
		if l.ends == nil {
			l.ends = map[Rail]Instant{}
		}
		l.ends[r] = now + Age
	}
	l.next = lease.Never
	for _, end := range l.ends {
		l.next = min(l.next, end)
	}
}

// Expire drops credits that the receiver has not sent again, and calls lift for each.
func (l *Limits) Expire(now Instant, lift func(Rail)) {
	if len(l.ends) == 0 || now < l.next {
		return
	}
	l.next = lease.Never
	for r, end := range l.ends {
		if end > now {
			l.next = min(l.next, end)
			continue
		}
		delete(l.ends, r)
		lift(r)
	}
}
