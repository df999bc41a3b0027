"""The processes of a pod, each a program of its own that test/pods/kubelet.py starts.

    container.py pause NAME       holds a pod's namespaces and collects its orphans
    container.py run SPEC         runs a container in them; its status is the container's

SPEC is JSON: pid (of the pause process), shared (whether the pod's containers see each other's
processes), root, argv, env, cwd, uid, gid, groups, read_only, no_new_privileges, mounts (source,
target, read_only), tmpfs, files (path and text).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import socket
import sys

NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS = 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000
RDONLY, NOSUID, REMOUNT, BIND, REC, PRIVATE = 1, 2, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
DEVICES = ("null", "zero", "full", "random", "urandom")
libc = ctypes.CDLL(None, use_errno=True)


def check(what: str, rc: int) -> None:
    if rc:
        err = ctypes.get_errno()
        raise OSError(err, f"{what}: {os.strerror(err)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    check(
        f"mount {source} at {target}",
        libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()),
    )


def bind(source: str, target: str, read_only: bool) -> None:
    place = pathlib.Path(target)
    if pathlib.Path(source).is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    mount(source, target, flags=BIND | REC)
    if read_only:
        # In a user namespace, flags of the mount below stay as they are. Their bits are those of
        # statvfs.
        kept = os.statvfs(target).f_flag & (
            os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
        )
        mount("", target, flags=BIND | REMOUNT | RDONLY | kept)


def build_root(spec: dict) -> None:
    root = spec["root"]
    mount("", "/", flags=REC | PRIVATE)
    mount("root", root, "tmpfs", data="mode=755")
    for path, target in spec["links"].items():
        os.symlink(target, root + path)
    for path, text in spec["files"].items():
        file = pathlib.Path(root + path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for folder in ("proc", "dev", "old", "tmp"):
        os.makedirs(f"{root}/{folder}", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)
    for device in DEVICES:
        bind(f"/dev/{device}", f"{root}/dev/{device}", False)
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        os.symlink(target, f"{root}/dev/{name}")
    mount("shm", str(made(f"{root}/dev/shm")), "tmpfs", data="size=64m,mode=1777")
    for source, target, read_only in spec["mounts"]:
        bind(source, root + target, read_only)
    mount("proc", f"{root}/proc", "proc")
    bind("/sys", f"{root}/sys", True)
    os.chdir(root)
    check("pivot_root", libc.syscall(155, b".", b"old"))
    os.chdir("/")
    check("umount", libc.umount2(b"/old", 2))
    os.rmdir("/old")
    if spec["read_only"]:
        mount("", "/", flags=REMOUNT | BIND | RDONLY)


def made(path: str) -> pathlib.Path:
    p = pathlib.Path(path)
    p.mkdir(parents=True, exist_ok=True)
    return p


def become(spec: dict) -> None:
    """The container's own process, from here on."""
    os.setsid()
    build_root(spec)
    if spec["switch_user"]:
        os.setgroups(spec["groups"])
        os.setresgid(spec["gid"], spec["gid"], spec["gid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    if spec["no_new_privileges"]:
        check("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chdir(spec["cwd"])
    os.execvpe(spec["argv"][0], spec["argv"], spec["env"])


def child(then) -> int:  # type: ignore[no-untyped-def]
    """Forks, has the child do something, passes SIGTERM on to it, and returns its status."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            then()
        except BaseException as err:
            print(f"container: {err!r}", file=sys.stderr, flush=True)
        os._exit(125)

    def passed_on(sig: int, _: object) -> None:
        os.kill(pid, sig)

    signal.signal(signal.SIGTERM, passed_on)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)  # a container ends with all that it started
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def run(spec: dict) -> int:
    spaces = [
        (kind, os.open(f"/proc/{spec['pid']}/ns/{kind}", os.O_RDONLY))
        for kind in ("net", "ipc", "uts", "pid")
    ]
    for kind, fd in spaces:
        check(f"setns {kind}", libc.setns(fd, 0))
    check("unshare", libc.unshare(NEWNS))
    if spec["shared"]:
        return child(lambda: become(spec))

    def own_processes() -> None:
        check("unshare", libc.unshare(NEWPID))
        os._exit(child(lambda: become(spec)))

    return child(own_processes)


def pause(name: str) -> None:
    """The first process of a pod: it collects what its containers leave behind."""
    socket.sethostname(name)

    def collect(*_: object) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    signal.signal(signal.SIGCHLD, collect)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    collect()
    while True:
        signal.pause()


if __name__ == "__main__":
    if sys.argv[1] == "pause":
        pause(sys.argv[2])
    sys.exit(run(json.loads(sys.argv[2])))
