"""The tests run in a network namespace of their own, in which a rail can lose its link."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "rig")]
MUST_RUN = os.environ.get("KVSPRAY_MUST_RUN", "").split(",")
CHROMIUM = next(
    (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))),
    None,
)
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000

refused = ""


def unshare() -> str:
    """Moves this process, which has one thread yet, to its own namespace. Returns why it could
    not."""
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        return os.strerror(ctypes.get_errno())
    try:
        pathlib.Path("/proc/self/setgroups").write_text("deny")
        pathlib.Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        pathlib.Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as err:
        return str(err)
    return ""


def pytest_sessionstart() -> None:
    global refused
    refused = unshare() if CHROMIUM else "not tried"


def skip(feature: str, reason: str) -> None:
    if feature in MUST_RUN:
        pytest.fail(f"KVSPRAY_MUST_RUN names {feature}, but: {reason}")
    pytest.skip(f"{feature}: {reason}")


@pytest.fixture(scope="session")
def needs() -> None:
    if CHROMIUM is None:
        skip("chromium", "the package chromium is not installed")
    if refused:
        skip("netns", f"no network namespace of the user's own: {refused}")
