#!/usr/bin/env python3
"""Runs the shell blocks of the getting-started pages, in their order, as a reader of the page
would.

A comment before a block, which no reader sees, has how it runs:

    <!-- block: skip REASON -->     not here
    <!-- block: serves URL ... -->  its first paragraphs go on in the background, from when their
                                    URLs answer
    <!-- block: shows TEXT -->      what the output of the others has to contain
    <!-- block: host ADDRESS ... -->  on other hosts, which are network namespaces: its paragraphs
                                    one after the other, or its only one on each, with the address
                                    of that host
    <!-- block: WORD is TEXT -->    what this reader writes instead of a word of the page; $UID and
                                    $RUN are the user's id and a directory

Several of them may stand before a block, one in each line. A block without one has to end with
status 0. All of it runs in namespaces of its own, so that the pages' ports are free, and nothing
that was started outlives the test.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable

from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / ".build"
OUT = BUILD / "test-docs"
# Sockets have short names.
RUN = pathlib.Path(tempfile.gettempdir()) / f"kvspray-docs-{time.time_ns():x}"
BLOCK_S, SERVES_S, SHOWS_S, STOP_S = 300.0, 420.0, 20.0, 60.0
PAGES = {  # of each environment that a reader may have, in the order of reading
    "venv": ["docs/getting-started.md"],
    "venv-sglang": ["docs/sglang.md", "docs/sglang-pd.md"],
}
INSIDE = "KVSPRAY_DOCS_INSIDE"
COMMENT = re.compile(
    r"block: (skip|serves|shows|host|(?P<word>\S+) is) (?P<text>.+?)\s*(?:-->|$)", re.M
)
# Commands of the reader's environment. vLLM's own runs the interpreter of the environment that has
# vLLM, not the reader's. A reader without an accelerator adds options of SGLang, which has no CPU
# build; test/sglang has what it lacks.
SHIMS = {
    "venv": {"vllm": 'exec "$KVSPRAY_DOCS_PYTHON" -m vllm.entrypoints.cli.main "$@"'},
    "venv-sglang": {
        "python": 'case "$*" in "-m sglang.launch_server "*) set -- "$@" --device cpu '
        "--mem-fraction-static 0.7 --max-total-tokens 2048 --max-running-requests 8 "
        "--disable-overlap-schedule --skip-server-warmup --enable-cache-report;; esac\n"
        'exec "$KVSPRAY_DOCS_PYTHON" "$@"'
    },
}
ENV = {
    "venv": {},
    "venv-sglang": {
        "PYTHONPATH": str(ROOT / "test/sglang/stand_ins"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    },
}


class Failed(Exception):
    pass


class Block:
    def __init__(self, number: int, line: int, text: str, notes: str) -> None:
        self.number, self.line, self.text = number, line, text
        self.skip = ""
        self.hosts, self.serves, self.shows = list[str](), list[str](), list[str]()
        self.words: dict[str, str] = {}
        found = list(COMMENT.finditer(notes))
        if len(found) != notes.count("block:"):
            raise Failed(f"the comment before line {line} is not understood: {notes.strip()}")
        for m in found:
            if m["word"]:
                self.words[m["word"]] = m["text"]
            elif m[1] == "serves":
                self.serves += m["text"].split()
            elif m[1] == "host":
                self.hosts += m["text"].split()
            elif m[1] == "shows":
                self.shows.append(m["text"])
            else:
                self.skip = m["text"]

    def parts(self) -> list[tuple[str, str, str]]:
        """The pieces of it that run by themselves: host, text, and the URL of those that go on in
        the background."""
        pieces = (
            re.split(r"\n\s*\n", self.text.strip()) if self.serves or self.hosts else [self.text]
        )
        if len(pieces) == 1 and len(self.hosts) > 1:
            own = [lambda text, host=host: text.replace(self.hosts[0], host) for host in self.hosts]
            urls = self.serves * len(own)
            return [
                (host, put(pieces[0]), put(urls[i]) if urls else "")
                for i, (host, put) in enumerate(zip(self.hosts, own, strict=True))
            ]
        if len(self.serves) > len(pieces) or len(self.hosts) not in (0, 1, len(pieces)):
            raise Failed(
                f"line {self.line}: {len(pieces)} paragraphs, {len(self.serves)} URLs, "
                f"{len(self.hosts)} hosts"
            )
        hosts = (
            self.hosts * len(pieces) if len(self.hosts) == 1 else self.hosts or [""] * len(pieces)
        )
        return [
            (hosts[i], text, self.serves[i] if i < len(self.serves) else "")
            for i, text in enumerate(pieces)
        ]


def blocks(page: str) -> list[Block]:
    out, notes = [], ""
    for token in MarkdownIt("commonmark").parse((ROOT / page).read_text()):
        if token.type == "html_block":
            notes += token.content
        elif token.type in ("code_block", "fence"):
            out.append(Block(len(out) + 1, (token.map or [0])[0] + 1, token.content, notes))
            notes = ""
        elif notes and token.type == "inline" and "block:" in notes:
            raise Failed(f"{page}: no block follows {notes.strip()}")
    if not out:
        raise Failed(f"{page} has no block")
    return out


class Hosts:
    """Network namespaces that are joined by a bridge, as hosts on one network. Each page has its
    own."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.name = f"docs{next(self.numbers)}"

    def command(self, address: str) -> list[str]:
        """What runs a command on the host with this address."""
        if not address:
            return []
        if address not in self.pids:
            n = len(self.pids)
            if not n:
                sh(f"ip link add {self.name} type bridge && ip link set {self.name} up")
            holder = subprocess.Popen(
                ["unshare", "--net", "sleep", "infinity"], start_new_session=True
            )
            own = os.readlink("/proc/self/ns/net")
            until(
                "a network namespace", lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own, 10
            )
            sh(f"ip link add {self.name}-{n} type veth peer name eth0 netns {holder.pid}")
            sh(f"ip link set {self.name}-{n} master {self.name} up")
            self.pids[address] = holder.pid
            inside = shlex.join(self.command(address))
            sh(
                f"{inside} ip link set lo up; {inside} ip address add {address}/24 dev eth0; "
                f"{inside} ip link set eth0 up"
            )
            # A host that has none does not find its own address, SGLang finds.
            sh(f"{inside} ip route add default dev eth0")
        return ["nsenter", "--target", str(self.pids[address]), "--net"]


def sh(text: str) -> None:
    done = subprocess.run(["bash", "-euc", text], capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{text}: {done.stdout}{done.stderr}")


def until(what: str, check: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {seconds:g} s")
        time.sleep(0.2)


class Page:
    def __init__(self, name: str, kind: str) -> None:
        self.name, self.blocks = name, blocks(name)
        self.running: list[tuple[subprocess.Popen[bytes], pathlib.Path]] = []
        self.logs = OUT / pathlib.Path(name).stem
        self.logs.mkdir(parents=True)
        self.hosts = Hosts()
        self.words: dict[str, str] = {}
        reader = reader_env(kind)
        shims = OUT / f"shims-{kind}"
        shims.mkdir(exist_ok=True)
        for command, text in SHIMS[kind].items():
            (shims / command).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (shims / command).chmod(0o755)
        self.env = {**os.environ, **ENV[kind], "PATH": f"{shims}:{reader}/bin:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(runtime("here")), "KVSPRAY_DOCS_PYTHON": f"{reader}/bin/python",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
        self.env.pop("KVSPRAY_BINARY", None)

    def run(self) -> tuple[int, list[str]]:
        """How many blocks ran, and which did not."""
        ran, marked = 0, []
        try:
            for b in self.blocks:
                self.words.update(b.words)
                if b.skip:
                    marked.append(f"{self.name}:{b.line}: {b.skip}")
                    say(f"{self.name}:{b.line} does not run here: {b.skip}")
                    continue
                started = time.monotonic()
                try:
                    # What servers report comes a moment after what they did.
                    until(
                        "what it has to show", lambda b=b: self.do(b), SHOWS_S
                    ) if b.shows and not b.serves else self.do(b)
                except Failed as err:
                    raise Failed(f"{self.name}:{b.line}: {err}\nthe block:\n{b.text}") from err
                ran += 1
                say(f"{self.name}:{b.line} ok after {time.monotonic() - started:.1f} s")
        finally:
            self.stop()
        return ran, marked

    def script(self, text: str) -> str:
        for word, own in self.words.items():
            text = re.sub(
                rf"(?<![\w$]){re.escape(word)}(?!\w)",
                lambda _, own=own: own.replace("$UID", str(os.getuid())).replace("$RUN", str(RUN)),
                text,
            )
        state = shlex.quote(str(self.logs / "exports"))
        # A variable that a block exports is there in the reader's later blocks.
        return (
            f"runtime=$XDG_RUNTIME_DIR\n[ ! -e {state} ] || source "
            f"{state}\nXDG_RUNTIME_DIR=$runtime\nset -euo pipefail\n{text}\nexport -p >{state}\n"
        )

    def start(self, host: str, text: str, log: pathlib.Path) -> subprocess.Popen[bytes]:
        env = {**self.env, **({"XDG_RUNTIME_DIR": str(runtime(host))} if host else {})}
        command = [*self.hosts.command(host), "bash", "-c", self.script(text)]
        with log.open("ab") as out:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def do(self, b: Block) -> bool:
        """Runs a block. False if its output is not yet what it has to be."""
        waits = []
        for i, (host, text, url) in enumerate(b.parts()):
            log = self.logs / f"{b.line}-{i + 1}.log"
            if url:
                proc = self.start(host, text, log)
                self.running.append((proc, log))
                waits.append((proc, log, self.hosts.command(host), url))
                continue
            while waits:
                self.wait(*waits.pop())
            log.unlink(missing_ok=True)
            self.finish(self.start(host, text, log), log)
        while waits:
            self.wait(*waits.pop())
        shown = "".join(log.read_text() for log in self.logs.glob(f"{b.line}-*.log"))
        if missing := [text for text in b.shows if text not in shown]:
            if b.serves:
                raise Failed(f"its output does not contain {missing[0]!r}:\n{shown[-4000:]}")
            return False
        for proc, log in self.running:
            if proc.poll() is not None:
                raise Failed(
                    f"a server has ended with status {proc.poll()}; {log} ends with\n{tail(log)}"
                )
        return True

    def finish(self, proc: subprocess.Popen[bytes], log: pathlib.Path) -> None:
        try:
            rc = proc.wait(BLOCK_S)
        except subprocess.TimeoutExpired:
            os.killpg(proc.pid, signal.SIGKILL)
            raise Failed(
                f"did not end within {BLOCK_S:g} s; {log} ends with\n{tail(log)}"
            ) from None
        if rc:
            raise Failed(f"ended with status {rc}; {log} ends with\n{tail(log)}")

    def wait(
        self, proc: subprocess.Popen[bytes], log: pathlib.Path, inside: list[str], url: str
    ) -> None:
        def answers() -> bool:
            if proc.poll() is not None:
                raise Failed(f"it ended with status {proc.poll()}; {log} ends with\n{tail(log)}")
            return (
                subprocess.run(
                    [*inside, "curl", "-fs", "-m", "5", "-o", "/dev/null", url]
                ).returncode
                == 0
            )

        until(f"an answer of {url}; {log}", answers, SERVES_S)

    def stop(self) -> None:
        """As the page has it: Ctrl-C in each terminal, what came last first."""
        late = []
        for proc, log in reversed(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(proc.pid, signal.SIGINT)
            try:
                proc.wait(STOP_S)
            except subprocess.TimeoutExpired:
                late.append(str(log))
                os.killpg(proc.pid, signal.SIGKILL)
                proc.wait()
        self.running = []
        if late and sys.exc_info()[0] is None:
            raise Failed(f"{self.name}: no end within {STOP_S:g} s of Ctrl-C: {', '.join(late)}")


def tail(log: pathlib.Path, n: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-n:])


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def runtime(host: str) -> pathlib.Path:
    folder = RUN / host
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder


def reader_env(kind: str) -> pathlib.Path:
    """An environment with the engine and without kvspray's packages, which the page installs."""
    out = OUT / kind
    if not out.exists():
        venv.create(out)
        (site,) = out.glob("lib/python*/site-packages")
        (engine,) = (BUILD / kind).glob("lib/python*/site-packages")
        # pip leaves what is in another environment alone, and what it installs goes first.
        (site / "engine.pth").write_text(f"{engine}\n")
    return out


def inside(argv: list[str]) -> int | None:
    """The status of this program in namespaces of its own; None where the kernel forbids them."""
    ways = [["unshare"], ["unshare", "--user", "--map-root-user"]]
    for way in ways[1:] if os.geteuid() else ways:
        way += ["--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        if subprocess.run([*way, "true"], capture_output=True).returncode == 0:
            return subprocess.run(
                [*way, sys.executable, *argv], env={**os.environ, INSIDE: "1"}
            ).returncode
    return None


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("env", nargs="*", choices=[[], *PAGES], help="whose pages; none: all")
    kinds = ap.parse_args().env or list(PAGES)
    if INSIDE not in os.environ:
        if (rc := inside(sys.argv)) is not None:
            return rc
        print(
            "SKIPPED test/docs/blocks.py::pages - Skipped: netns: the kernel refuses namespaces to "
            "this user"
        )
        print("docs: no block ran")
        return 0
    sh("ip link set lo up")
    shutil.rmtree(OUT, ignore_errors=True)
    RUN.mkdir(mode=0o700)
    ran, marked, done, absent = 0, [], [], []
    keys = [ROOT / "cluster.key"]
    try:
        if there := [str(k) for k in keys if k.exists()]:
            raise Failed(f"the pages make {there[0]}, which is there already: move it away")
        for kind in kinds:
            if not (BUILD / kind / ".stamp-own").exists():
                absent += PAGES[kind]
                print(
                    f"SKIPPED test/docs/blocks.py::{kind} - Skipped: sglang: .build/{kind} is not "
                    "there, make test-sglang makes it"
                )
                continue
            for page in PAGES[kind]:
                n, skipped = Page(page, kind).run()
                ran, marked, done = ran + n, marked + skipped, [*done, page]
                for k in keys:
                    k.unlink(missing_ok=True)
    except Failed as err:
        print(f"docs: FAILED: {err}", file=sys.stderr)
        return 1
    finally:
        for k in keys:
            k.unlink(missing_ok=True)
        shutil.rmtree(RUN, ignore_errors=True)
    for line in marked:
        print(f"  marked in the page: {line}")
    print(
        f"docs: {ran} blocks of {len(done)} pages ran, {len(marked)} are marked as not for this "
        f"machine, {len(absent)} pages without their engine"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
