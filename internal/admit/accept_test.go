package admit

import (
	"net"
	"syscall"
	"testing"
)

func TestAcceptedOutlivesErrors(t *testing.T) {
	one, other := net.Pipe()
	defer one.Close()
	defer other.Close()
	answers := []error{syscall.EMFILE, nil, syscall.ECONNABORTED, nil, net.ErrClosed}
	accept := func() (net.Conn, error) {
		err := answers[0]
		answers = answers[1:]
		if err != nil {
			return nil, err
		}
		return one, nil
	}
	var conns, failed int
	for range Accepted(t.Context().Done(), accept, func(error) { failed++ }) {
		conns++
	}
	if conns != 2 || failed != 2 || len(answers) > 0 {
		t.Errorf("%d connections, %d errors, %v left; want 2, 2 and none", conns, failed, answers)
	}
}

func TestAcceptedEndsInItsPause(t *testing.T) {
	done := make(chan struct{})
	accept := func() (net.Conn, error) { return nil, syscall.EMFILE }
	for range Accepted(done, accept, func(error) { close(done) }) {
		t.Fatal("a connection")
	}
}
