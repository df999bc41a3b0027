package testutil

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// namespaceEnv names, in a child of InNamespace or MainInNamespace, the test to run.
const namespaceEnv = "KVSPRAY_TEST_NETNS"

// childOutput bounds the shown output of a failed child, in bytes from its end.
const childOutput = 16 << 10

// InNamespace runs the calling test again in a child that has a network namespace of its own, whose
// loopback is up, and reports whether this is the child. A user other than root gets a user
// namespace with it, in which the child is root. Where the kernel permits neither, the test skips
// ("netns").
func InNamespace(tb testing.TB) bool {
	tb.Helper()
	if os.Getenv(namespaceEnv) == tb.Name() {
		// some kernels grant the namespace without rights in it
		if err := loopbackUp(); err != nil {
			Skip(tb, "netns", err.Error())
		}
		return true
	}
	left := time.Duration(0) // no limit
	if t, ok := tb.(*testing.T); ok {
		if at, ok := t.Deadline(); ok {
			left = time.Until(at)
		}
	}
	cmd, err := inNamespace(tb.Name(), "-test.run="+only(tb.Name()), "-test.v",
		"-test.timeout="+left.String(), fmt.Sprintf("-test.short=%t", testing.Short()))
	if err != nil {
		tb.Fatal(err)
	}
	runtime.LockOSThread() // Pdeathsig counts the life of the thread
	out, err := cmd.CombinedOutput()
	runtime.UnlockOSThread()
	switch output := string(out[max(0, len(out)-childOutput):]); {
	case err != nil && cmd.Process == nil:
		Skip(tb, "netns", notPermitted(err))
	case err != nil:
		tb.Errorf("%v\n%s", err, output)
	case !ranAs(out, tb.Name()): // go test ends with success where nothing matches
		tb.Errorf("the child ran no test of the name %s:\n%s", tb.Name(), output)
	case strings.Contains(output, "--- SKIP: "+tb.Name()+" "): // through Skip, which has counted it
		tb.Skip(output)
	case testing.Verbose():
		tb.Log(output)
	}
	return false
}

// only is the pattern for -test.run that matches one test, of whatever name.
func only(name string) string {
	parts := strings.Split(name, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return strings.Join(parts, "/")
}

// ranAs reports whether a verbose test's output has the end of a test, under its name alone.
func ranAs(out []byte, name string) bool {
	for line := range strings.Lines(string(out)) {
		for _, end := range []string{"PASS", "SKIP"} {
			if strings.HasPrefix(strings.TrimLeft(line, " "), "--- "+end+": "+name+" (") {
				return true
			}
		}
	}
	return false
}

// MainInNamespace runs this test binary again as InNamespace does, for packages in which every test
// needs the right to make network namespaces. It reports the child's exit code, and false where the
// caller goes on itself: it is the child, it is root, or the kernel refuses, in which case tests
// skip one by one.
func MainInNamespace() (code int, ran bool) {
	if os.Geteuid() == 0 {
		return 0, false
	}
	cmd, err := inNamespace("main", os.Args[1:]...)
	if err != nil {
		return 0, false
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	runtime.LockOSThread() // Pdeathsig counts the life of the thread
	err = cmd.Run()
	runtime.UnlockOSThread()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, true
	case errors.As(err, &exit) && exit.Exited():
		return exit.ExitCode(), true
	case cmd.Process == nil:
		return 0, false
	}
	fmt.Fprintln(os.Stderr, "in a namespace:", err)
	return 1, true
}

// inNamespace is this binary with other arguments, about to run in namespaces of its own.
func inNamespace(what string, args ...string) (*exec.Cmd, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("the test binary's own path: %w", err)
	}
	cmd := exec.Command(exe, args...)
	cmd.Env = append(os.Environ(), namespaceEnv+"="+what)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET,
		Pdeathsig: syscall.SIGKILL}
	if uid, gid := os.Geteuid(), os.Getegid(); uid != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: gid, Size: 1}}
	}
	return cmd, nil
}

func notPermitted(err error) string {
	return "no network namespace can be made here: " + err.Error() +
		" (run as root, or allow user namespaces: sysctl user.max_user_namespaces, " +
		"kernel.apparmor_restrict_unprivileged_userns)"
}

// loopbackUp brings lo of this process's network namespace up, which is down in a new one.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("a socket in the new network namespace: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	lo.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo); err != nil {
		return fmt.Errorf("bring up lo of the new network namespace: %w", err)
	}
	return nil
}
