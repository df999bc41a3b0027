"""A sidecar's engine side in plain Python, for the shim's tests: a second, independent reading of
docs/protocol.md and board.h.

Run as `fake_sidecar.py OPTIONS_JSON`. Commands come as JSON lines on stdin, events go as JSON lines
to stdout.
"""

from __future__ import annotations

import array
import json
import mmap
import os
import pathlib
import selectors
import socket
import struct
import sys
from typing import Any

import msgpack

TYPES = {"HELLO": 1, "WELCOME": 2, "REGISTER": 3, "REGISTERED": 4, "ERROR": 5, "AWAIT": 6,
    "ADMITTED": 7, "BYE": 8, "DECLINE": 10, "OPEN": 11, "OPENED": 12, "UNPIN": 15,
    "ADD_REGIONS": 17, "DROP_REGIONS": 18, "DONE": 19, "CLOSE": 20, "HELD": 21}  # fmt: skip
RECORDS = {
    "STEP": 1,
    "INTENT": 2,
    "EXPECT": 3,
    "CANCEL": 4,
    "PREEMPT": 5,
    "HOLD": 6,
    "COPY": 7,
    "LOAD": 10,
    "YIELD": 11,
    "RECEIVED": 32,
    "SENT": 33,
}
RECORD_NAMES = {v: k for k, v in RECORDS.items()}
RECORD = struct.Struct("<IHHQQQII")
RING_BYTES = 192
HEAD, TAIL, SLEEPING = 0, 64, 128


def emit(ev: str, **fields: Any) -> None:
    print(json.dumps({"ev": ev, **fields}), flush=True)


class Ring:
    def __init__(self, mem: mmap.mmap, offset: int, size: int) -> None:
        self.mem, self.offset, self.data, self.size = mem, offset, offset + RING_BYTES, size
        self.pos = 0
        self.seq = 0

    def word(self, at: int) -> int:
        return int(struct.unpack_from("<Q", self.mem, self.offset + at)[0])

    def store(self, at: int, value: int) -> None:
        struct.pack_into("<Q", self.mem, self.offset + at, value)

    def pop(self) -> tuple[int, int, int, int, bytes] | None:
        while True:
            head = self.word(HEAD)
            if head == self.pos:
                return None
            at = self.pos & (self.size - 1)
            length, kind = struct.unpack_from("<IH", self.mem, self.data + at)
            if kind == 0:
                assert length == self.size - at, (length, self.size - at)
                self.pos += length
                self.store(TAIL, self.pos)
                continue
            length, kind, status, seq, lease, epoch, body_bytes, reserved = RECORD.unpack_from(
                self.mem, self.data + at
            )
            assert seq == self.seq + 1 and status == 0 and reserved == 0, (
                seq,
                self.seq,
                status,
                reserved,
            )
            assert length == (RECORD.size + body_bytes + 7) // 8 * 8 and at + length <= self.size
            start = self.data + at + RECORD.size
            body = bytes(self.mem[start : start + body_bytes])
            self.seq = seq
            self.pos += length
            self.store(TAIL, self.pos)
            return kind, lease, seq, epoch, body

    def push(self, kind: int, status: int, lease: int, body: bytes, seq: int | None = None) -> bool:
        length = (RECORD.size + len(body) + 7) // 8 * 8
        at = self.pos & (self.size - 1)
        rest = self.size - at
        need = length + (rest if rest < length else 0)
        if self.size - (self.pos - self.word(TAIL)) < need:
            return False
        if rest < length:
            struct.pack_into("<IHH", self.mem, self.data + at, rest, 0, 0)
            self.pos += rest
            at = 0
        self.seq += 1
        RECORD.pack_into(
            self.mem,
            self.data + at,
            length,
            kind,
            status,
            self.seq if seq is None else seq,
            lease,
            0,
            len(body),
            0,
        )
        start = self.data + at + RECORD.size
        self.mem[start : start + len(body)] = body
        self.pos += length
        self.store(HEAD, self.pos)
        return True

    def sleep(self) -> bool:
        """Announces sleep; True if the ring is still empty."""
        struct.pack_into("<I", self.mem, self.offset + SLEEPING, 1)
        return self.word(HEAD) == self.pos

    def asleep(self) -> bool:
        if struct.unpack_from("<I", self.mem, self.offset + SLEEPING)[0] != 1:
            return False
        struct.pack_into("<I", self.mem, self.offset + SLEEPING, 0)
        return True


class Session:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds: list[int] = []
        self.rings: mmap.mmap | None = None
        self.flags: mmap.mmap | None = None
        self.sq_eventfd = self.cq_eventfd = -1
        self.role = ""
        self.flags_at = (0, 0, 0)  # layer flags, load flags, source epoch


class Fake:
    def __init__(self, options: dict[str, Any]) -> None:
        self.o = options
        self.boot = bytes.fromhex(options["boot"]) if "boot" in options else os.urandom(16)
        self.fenced = list(options.get("fenced", []))  # per WELCOME, then True
        self.sel = selectors.DefaultSelector()
        self.session: Session | None = None
        self.reading = options.get("reading", True)
        self.listen()
        self.left: set[int] = set()
        self.sources: set[int] = set()
        self.stdin = b""
        os.set_blocking(0, False)
        self.sel.register(0, selectors.EVENT_READ, self.command)

    def listen(self) -> None:
        path = pathlib.Path(self.o["socket"])
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen(16)
        self.sel.register(self.listener, selectors.EVENT_READ, self.accept)

    def send(self, s: Session, name: str, body: dict[str, Any]) -> None:
        if name in self.o.get("replay", {}):
            self.replay(s, name, body["id"], self.o["replay"][name])
            return
        try:
            s.sock.send(struct.pack("<I", TYPES[name]) + msgpack.packb(body))
        except OSError as e:
            emit("send-failed", error=str(e))

    def replay(self, s: Session, name: str, answered: int, packet: str) -> None:
        """Sends a recorded packet as it stands, but for the id of what it answers."""
        raw = bytes.fromhex(packet)
        assert struct.unpack_from("<I", raw)[0] == TYPES[name]
        at = raw.index(b"\xa2id") + 3
        assert raw[at] < 0x80 and answered < 0x80, "both ids are one byte"
        s.sock.send(raw[:at] + bytes([answered]) + raw[at + 1 :])

    def accept(self) -> None:
        sock, _ = self.listener.accept()
        s = Session(sock)
        self.sel.register(sock, selectors.EVENT_READ, lambda: self.packet(s))

    def packet(self, s: Session) -> None:
        try:
            data, ancillary, _, _ = s.sock.recvmsg(1 << 20, socket.CMSG_SPACE(32 * 4))
        except OSError:
            data, ancillary = b"", []
        if not data:
            self.drop(s)
            emit("eof")
            return
        fds = array.array("i")
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(raw)
        kind = struct.unpack_from("<I", data)[0]
        m = msgpack.unpackb(data[4:], raw=False)
        if kind == TYPES["HELLO"]:
            self.hello(s, m, data[4:].hex())
        elif kind == TYPES["REGISTER"]:
            self.register(s, m, list(fds), data[4:].hex())
        elif kind == TYPES["AWAIT"]:
            emit(
                "await",
                raw=data[4:].hex(),
                **{k: v.hex() if isinstance(v, bytes) else v for k, v in m.items()},
            )
        elif kind == TYPES["DECLINE"]:
            emit(
                "decline",
                raw=data[4:].hex(),
                **{k: v.hex() if isinstance(v, bytes) else v for k, v in m.items()},
            )
        elif kind == TYPES["ADD_REGIONS"]:
            emit(
                "add_regions",
                first=m["first"],
                fds=len(fds),
                regions=[{**r, "region": r["region"].hex()} for r in m["regions"]],
            )
            for fd in fds:
                os.close(fd)
            if not self.o.get("no_done"):
                self.send(s, "DONE", {"id": m["id"]})
        elif kind == TYPES["DROP_REGIONS"]:
            emit(
                "drop_regions",
                id=m["id"],
                regions=list(struct.unpack(f"<{len(m['regions']) // 4}I", m["regions"])),
            )
        elif kind in (TYPES["OPEN"], TYPES["UNPIN"], TYPES["CLOSE"]):
            emit("pages", kind=kind, named=m.get("id") or m.get("pin") or m.get("open"))
        elif kind == TYPES["BYE"]:
            emit("bye", reason=m["reason"])

    def hello(self, s: Session, m: dict[str, Any], raw: str) -> None:
        emit("hello", role=m["role"], boot=m["boot"].hex(), pid=m["pid"], hex=raw)
        s.role = m["role"]
        if self.o.get("mute"):
            return
        if "refuse" in self.o:
            self.send(s, "ERROR", {"id": m["id"], "code": self.o["refuse"],
                "message": "versions 9.0 to 9.9 are spoken here", "field": "max",
                "remedy": "upgrade the shim", "fatal": True})  # fmt: skip
            return
        if self.o.get("fencing"):
            self.send(s, "ERROR", {"id": m["id"], "code": "fencing", "message": "not fenced yet",
                "field": "boot", "remedy": "send HELLO again", "fatal": False})  # fmt: skip
            return
        version = self.o.get("version", 1 << 16)
        self.session = s
        welcome = {
            "id": m["id"], "version": version, "boot": self.boot, "node": "fake",
            "endpoint": self.o.get("endpoint", "127.0.0.1:7001"), "host_boot": "h",
            "features": self.o.get("features", ["x"]), "fenced": self.fenced.pop(0) if self.fenced
            else True, "limits": {"leases": self.o.get("leases", 4096),
            "copies": self.o.get("copies", 64), "regions": 64, "record_bytes": 1 << 20},
            "deadline_ms": self.o["deadline_ms"], "match_timeout_ms": self.o["match_timeout_ms"],
            "grace_ms": self.o["grace_ms"], "release": "0.9.0",
            "from-the-future": [{"a": -1, "b": 1.5, "c": None}],
        }  # fmt: skip
        self.send(s, "WELCOME", welcome)

    def register(self, s: Session, m: dict[str, Any], fds: list[int], raw: str) -> None:
        s.fds = fds
        if "refuse_register" in self.o:
            self.send(
                s,
                "ERROR",
                {
                    "id": m["id"],
                    "code": "layout",
                    "message": "strategy unknown",
                    "field": "layout",
                    "remedy": "x",
                },
            )
            return
        at = m["fds"]
        s.sq_eventfd, s.cq_eventfd = fds[at["sq_eventfd"]], fds[at["cq_eventfd"]]
        seals = [fcntl_seals(fds[i]) for i in (at["flags"], at["rings"])]
        s.rings = mmap.mmap(fds[at["rings"]], os.fstat(fds[at["rings"]]).st_size)
        s.flags = mmap.mmap(fds[at["flags"]], os.fstat(fds[at["flags"]]).st_size)
        magic, major, minor, session, sub, comp, sub_bytes, comp_bytes, total, features = (
            struct.unpack_from("<IHH16sQQIIQQ", s.rings)
        )
        assert (magic, major, features, session, total) == (
            0x52495350,
            1,
            0,
            m["session"],
            len(s.rings),
        )
        (
            fmagic,
            _,
            _,
            boot,
            layers,
            stride,
            layer_at,
            load_at,
            epoch_at,
            ftotal,
            has,
            replay_at,
            mark_at,
        ) = struct.unpack_from("<IHH16sIIQQQQQQQ", s.flags)
        assert (fmagic, stride, ftotal, has) == (0x464C5350, 64, len(s.flags), 0)
        assert replay_at + 64 * (layers + 1) <= mark_at <= len(s.flags) - 8 and not any(
            s.flags[mark_at : mark_at + 8]
        )
        assert (
            epoch_at + 64 <= replay_at <= len(s.flags) - 64 * (layers + 1) and replay_at % 64 == 0
        )
        assert not any(s.flags[replay_at : replay_at + 64 * (layers + 1)])  # only GPUs write there
        s.flags_at = (layer_at, load_at, epoch_at)
        self.left.clear()
        self.sources.clear()
        self.sub = Ring(s.rings, sub, sub_bytes)
        self.comp = Ring(s.rings, comp, comp_bytes)
        self.sel.register(s.sq_eventfd, selectors.EVENT_READ, lambda: self.drain(s))
        regions = [
            {k: v.hex() if isinstance(v, bytes) else v for k, v in r.items()} for r in m["regions"]
        ]
        emit("register", session=m["session"].hex(), layers=layers, boot=boot.hex(),
            regions=regions, layout=m.get("layout"), seals=seals, first=m.get("first", 0),
            fds=len(fds), hex=raw)  # fmt: skip
        for _ in range(self.o.get("register_twice", 1)):
            self.send(
                s, "REGISTERED", {"id": m["id"], "fingerprint": b"f" * 32, "geometry": b"g" * 32}
            )
        self.drain(s)

    def drain(self, s: Session) -> None:
        if s.rings is None:
            return  # dropped in the same turn
        try:
            os.read(s.sq_eventfd, 8)
        except BlockingIOError:
            pass
        while self.reading and s.rings is not None:
            record = self.sub.pop()
            if record is None:
                if self.sub.sleep():
                    return
                continue
            kind, lease, seq, epoch, body = record
            if not self.o.get("quiet"):
                emit(
                    "record",
                    name=RECORD_NAMES[kind],
                    lease=lease,
                    seq=seq,
                    epoch=epoch,
                    hex=body.hex(),
                )
            if self.o.get("auto"):
                self.auto(s, kind, lease)

    def auto(self, s: Session, kind: int, lease: int) -> None:
        """Plays a whole sidecar: expectations land, held and cancelled sources end; with `lazy`,
        some leases are left alone."""
        if kind == RECORDS["EXPECT"]:
            if lease % 5 == self.o.get("lazy", -1):
                self.left.add(lease)
                return
            self.push(
                s,
                RECORDS["RECEIVED"],
                0,
                lease,
                msgpack.packb(
                    {"bytes": 1, "took_us": 2, "transport": "tcp", "reason": "", "recompute": []}
                ),
            )
        elif kind == RECORDS["CANCEL"] and lease in self.left:
            self.left.discard(lease)
            self.push(
                s,
                RECORDS["RECEIVED"],
                2,
                lease,
                msgpack.packb(
                    {"bytes": 0, "took_us": 2, "transport": "", "reason": "", "recompute": []}
                ),
            )
        elif kind == RECORDS["INTENT"]:
            self.sources.add(lease)
        elif kind in (RECORDS["HOLD"], RECORDS["CANCEL"]) and lease in self.sources:
            self.sources.discard(lease)
            status = 0 if kind == RECORDS["HOLD"] else 2
            self.push(
                s,
                RECORDS["SENT"],
                status,
                lease,
                msgpack.packb({"grants": 1, "bytes": 1, "reason": ""}),
            )

    def push(self, s: Session, *args: Any, **kw: Any) -> None:
        ok = self.comp.push(*args, **kw)
        if not ok:
            emit("completion-full")
        if self.comp.asleep():
            os.write(s.cq_eventfd, struct.pack("<Q", 1))

    def drop(self, s: Session) -> None:
        self.sel.unregister(s.sock)
        s.sock.close()
        if s.sq_eventfd >= 0 and s.rings is not None:
            self.sel.unregister(s.sq_eventfd)
        for fd in s.fds:
            os.close(fd)
        s.fds, s.rings = [], None
        if self.session is s:
            self.session = None

    def command(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            raise SystemExit
        self.stdin += data
        *lines, self.stdin = self.stdin.split(b"\n")
        for line in lines:
            self.do(json.loads(line))

    def do(self, c: dict[str, Any]) -> None:
        s = self.session
        cmd = c["cmd"]
        if cmd == "complete":
            assert s is not None
            self.push(
                s,
                RECORDS[c["name"]],
                c["status"],
                c["lease"],
                bytes.fromhex(c["hex"]),
                seq=c.get("seq"),
            )
        elif cmd == "flags":
            assert s is not None and s.flags is not None
            layer, load, epoch = s.flags_at
            count = (load - layer) // 64
            emit("flags", layers=[struct.unpack_from("<Q", s.flags, layer + 64 * i)[0]
                for i in range(count)], loads=[struct.unpack_from("<Q", s.flags, load + 64 * i)[0]
                for i in range(count - 1)], epoch=struct.unpack_from("<Q", s.flags,
                epoch)[0])  # fmt: skip
        elif cmd == "load":
            assert s is not None and s.flags is not None
            struct.pack_into("<Q", s.flags, s.flags_at[1] + 64 * c["layer"], c["value"])
            emit("done")
        elif cmd == "word":
            ring = self.sub if c["ring"] == "sub" else self.comp
            ring.store({"head": HEAD, "tail": TAIL}[c["word"]], c["value"])
            if c["ring"] == "comp" and ring.asleep():
                assert s is not None
                os.write(s.cq_eventfd, struct.pack("<Q", 1))
        elif cmd == "send":
            assert s is not None
            self.send(s, c["name"], c["body"])
        elif cmd == "replay":
            assert s is not None
            self.replay(s, c["name"], c["id"], c["hex"])
        elif cmd == "raw":
            assert s is not None
            s.sock.send(bytes.fromhex(c["hex"]))
        elif cmd == "close":
            if s is not None:
                self.drop(s)
        elif cmd == "garbage":
            if s is not None and s.rings is not None:
                self.push(s, 77, 9, 1 << 60, b"\xc1" * 9)
                self.push(s, RECORDS["RECEIVED"], 0, 1 << 60, b"\xc1")
                self.comp.store(HEAD, self.comp.pos + 16)
        elif cmd == "listen":
            if c["on"]:
                self.listen()
            else:
                self.sel.unregister(self.listener)
                self.listener.close()
        elif cmd == "reading":
            self.reading = c["on"]
            if self.reading and s is not None and s.rings is not None:
                self.drain(s)
        elif cmd == "option":
            self.o.update(c["set"])
        elif cmd == "ping":
            emit("pong")

    def run(self) -> None:
        emit("listening", boot=self.boot.hex(), pid=os.getpid())
        while True:
            for key, _ in self.sel.select():
                key.data()


def fcntl_seals(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, 1034)  # F_GET_SEALS


if __name__ == "__main__":
    Fake(json.loads(sys.argv[1])).run()
