package health

import (
	"testing"

	"github.com/kvspray/kvspray/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }
