package connector_test

import (
	"context"
	"fmt"
	"os"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/mem"
)

const childEnv = "KVSPRAY_TEST_CHILD_SOCKET"

// childMain is an engine worker of its own process: it registers, opens a lease, says so and waits to be killed.
func childMain() {
	fail := func(err error) {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	r, err := shape.Region()
	if err != nil {
		fail(err)
	}
	w, err := connectortest.DialWorker(context.Background(), connectortest.Config{Socket: os.Getenv(childEnv), Layout: shape.Layout(),
		Engine: msg.Engine{Name: "child"}, Regions: []*mem.Region{r}})
	if err != nil {
		fail(err)
	}
	if _, err := w.Intent(intent(16, 1)); err != nil {
		fail(err)
	}
	fmt.Println("ready")
	var line string
	_, _ = fmt.Scanln(&line)
	if line == "drop" {
		w.Disconnect()
		fmt.Println("dropped")
		_, _ = fmt.Scanln(&line)
	}
	os.Exit(0)
}
