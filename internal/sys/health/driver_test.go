//go:build cgo

package health

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"github.com/kvspray/kvspray/internal/testutil"
)

// board is a fake GPU whose values the test sets.
type board struct {
	lost     nvml.Return // of every call, unless it is SUCCESS
	ecc      uint64
	rows     bool
	clocks   uint64
	action   byte
	noAction bool // the driver lacks the field
	events   uint64
}

func (b *board) device(bus uint32, registered *uint64) *mock.Device {
	return &mock.Device{
		GetPciInfoFunc: func() (nvml.PciInfo, nvml.Return) { return nvml.PciInfo{Bus: bus}, b.lost },
		GetNameFunc:    func() (string, nvml.Return) { return "fake", nvml.SUCCESS },
		GetSupportedEventTypesFunc: func() (uint64, nvml.Return) {
			return b.events, nvml.SUCCESS
		},
		RegisterEventsFunc: func(v uint64, _ nvml.EventSet) nvml.Return {
			*registered |= v
			return nvml.SUCCESS
		},
		GetTotalEccErrorsFunc: func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) {
			return b.ecc, b.lost
		},
		GetRemappedRowsFunc: func() (int, int, bool, bool, nvml.Return) {
			return 0, 0, false, b.rows, b.lost
		},
		GetCurrentClocksEventReasonsFunc: func() (uint64, nvml.Return) { return b.clocks, b.lost },
		GetFieldValuesFunc: func(v []nvml.FieldValue) nvml.Return {
			if b.noAction {
				v[0].NvmlReturn = uint32(nvml.ERROR_NOT_SUPPORTED)
			}
			v[0].Value[0] = b.action
			return b.lost
		},
	}
}

type answer struct {
	nvml.EventData
	r nvml.Return
}

// host is a library with GPUs, and the answers to Wait.
func host(answers []answer, devices ...nvml.Device) *mock.Interface {
	return &mock.Interface{
		InitFunc:           func() nvml.Return { return nvml.SUCCESS },
		ShutdownFunc:       func() nvml.Return { return nvml.SUCCESS },
		DeviceGetCountFunc: func() (int, nvml.Return) { return len(devices), nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			return devices[i], nvml.SUCCESS
		},
		EventSetCreateFunc: func() (nvml.EventSet, nvml.Return) {
			return &mock.EventSet{
				FreeFunc: func() nvml.Return { return nvml.SUCCESS },
				WaitFunc: func(uint32) (nvml.EventData, nvml.Return) {
					if len(answers) == 0 {
						return nvml.EventData{}, nvml.ERROR_TIMEOUT
					}
					a := answers[0]
					answers = answers[1:]
					return a.EventData, a.r
				},
			}, nvml.SUCCESS
		},
	}
}

// TestDriver: events come with their GPU; those that a GPU does not have are not registered.
func TestDriver(t *testing.T) {
	const all = nvml.EventTypeAll
	var registered [2]uint64
	a := (&board{events: all}).device(0x1b, &registered[0])
	b := (&board{events: nvml.EventTypeXidCriticalError}).device(0x43, &registered[1])
	d, err := open(host([]answer{
		{nvml.EventData{Device: b, EventType: nvml.EventTypeXidCriticalError, EventData: 79},
			nvml.SUCCESS},
		{nvml.EventData{Device: a, EventType: nvml.EventTypeDoubleBitEccError}, nvml.SUCCESS},
		{nvml.EventData{Device: a, EventType: nvml.EventTypeGpuRecoveryAction}, nvml.SUCCESS},
		{nvml.EventData{}, nvml.ERROR_GPU_IS_LOST},
	}, a, b))
	if err != nil {
		t.Fatal(err)
	}
	if registered != [2]uint64{events, nvml.EventTypeXidCriticalError} {
		t.Errorf("registered: %#x", registered)
	}
	for _, want := range []Event{{PCI: "0000:43:00.0", Xid: 79}, {PCI: "0000:1b:00.0", Memo: true},
		{PCI: "0000:1b:00.0"}} {
		if e, came, err := d.Wait(time.Second); e != want || !came || err != nil {
			t.Errorf("%+v, %v, %v; want %+v", e, came, err, want)
		}
	}
	if _, came, err := d.Wait(time.Second); came || err == nil {
		t.Errorf("a lost GPU: %v, %v", came, err)
	}
	if _, came, err := d.Wait(time.Second); came || err != nil {
		t.Errorf("no event: %v, %v", came, err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// TestReadings: what a fake driver reports is in the readings; what it lacks restricts nothing.
func TestReadings(t *testing.T) {
	const pci = "0000:1b:00.0"
	for _, x := range []struct {
		b    board
		want Reading
	}{
		{board{}, Reading{PCI: pci, Action: ActionNone}},
		{board{noAction: true, action: 1}, Reading{PCI: pci}},
		{board{action: 1, ecc: 3}, Reading{PCI: pci, Action: ActionReset, Uncorrected: 3}},
		{board{action: 2}, Reading{PCI: pci, Action: ActionReboot}},
		{board{action: 3}, Reading{PCI: pci, Action: ActionDrainP2P}},
		{board{action: 4, rows: true}, Reading{PCI: pci, Action: ActionDrainReset, RowsFailed: true}},
		{board{action: 77}, Reading{PCI: pci}},
		// idle, at its power limit, with clocks that the operator has set
		{board{clocks: 1 | 2 | 4 | 0x10 | 0x100}, Reading{PCI: pci, Action: ActionNone}},
		{board{clocks: 0xe8}, Reading{PCI: pci, Action: ActionNone,
			Slowdown: HardwareSlowdown | HardwareThermal | SoftwareThermal | PowerBrake}},
		{board{lost: nvml.ERROR_RESET_REQUIRED}, Reading{PCI: pci, Action: ActionReset}},
		{board{lost: nvml.ERROR_GPU_IS_LOST}, Reading{PCI: pci, Lost: true}},
		{board{lost: nvml.ERROR_NOT_SUPPORTED, ecc: 5, rows: true, clocks: 0x40},
			Reading{PCI: pci}},
	} {
		b, registered := board{}, uint64(0)
		d, err := open(host(nil, b.device(0x1b, &registered)))
		if err != nil {
			t.Fatal(err)
		}
		b = x.b
		if got := d.Look(); !slices.Equal(got, []Reading{x.want}) {
			t.Errorf("%+v: %+v, want %+v", x.b, got, x.want)
		}
		if s := d.Describe(); len(s) != 1 || !strings.Contains(s[0], x.want.Action.String()) {
			t.Errorf("%+v: %q", x.b, s)
		}
	}
}

// A host without the library has no GPU to watch, and one whose library fails has the reason.
func TestNoDriver(t *testing.T) {
	lib := host(nil)
	lib.InitFunc = func() nvml.Return { return nvml.ERROR_LIBRARY_NOT_FOUND }
	if _, err := open(lib); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
	lib.InitFunc = func() nvml.Return { return nvml.ERROR_NO_PERMISSION }
	if _, err := open(lib); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
	lib = host(nil)
	lib.DeviceGetCountFunc = func() (int, nvml.Return) { return 0, nvml.ERROR_UNKNOWN }
	if _, err := open(lib); err == nil || len(lib.ShutdownCalls()) != 1 {
		t.Errorf("%v, the library was given back %d times", err, len(lib.ShutdownCalls()))
	}
}

// here opens the driver of this host.
func here(t *testing.T) *Driver {
	t.Helper()
	d, err := Open()
	if err != nil {
		testutil.Skip(t, "cuda", err.Error())
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// TestThisHost: the GPUs of this host can be read, and report errors of applications and their own.
func TestThisHost(t *testing.T) {
	d := here(t)
	for i, text := range d.Describe() {
		t.Log(text)
		t.Logf("%+v, events %#x", d.Look()[i], d.gpus[i].supported)
		if d.gpus[i].supported&nvml.EventTypeXidCriticalError == 0 {
			t.Errorf("%s reports no Xid errors", d.gpus[i].pci)
		}
	}
	e, came, err := d.Wait(time.Second)
	t.Logf("within a second: %+v, %v, %v", e, came, err)
	if err != nil {
		t.Error(err)
	}
}

// TestMeasureWatch: the CPU that a watch of this host's GPUs takes.
func TestMeasureWatch(t *testing.T) {
	testutil.Measures(t)
	d := here(t)
	cpu := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	const looks, waits = 100, 20
	before, began := cpu(), time.Now()
	for range looks {
		d.Look()
	}
	look, took := (cpu()-before)/looks, time.Since(began)/looks
	before = cpu()
	for range waits {
		if _, _, err := d.Wait(WaitEvery); err != nil {
			t.Fatal(err)
		}
	}
	wait := (cpu() - before) / waits
	share := float64(look)/float64(LookEvery) + float64(wait)/float64(WaitEvery)
	t.Logf("%d GPUs: a look %v of CPU in %v, a wait %v of CPU; together %.4f%% of a core", len(d.gpus),
		look, took, wait, 100*share)
	if share > 0.01 {
		t.Errorf("the watch takes %.2f%% of a core", 100*share)
	}
}
